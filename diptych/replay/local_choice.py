"""Choice between a pair and a decode worker alone, for a replay: the gateway's own rule."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.local_schedule import LocalBounds
from diptych.replay.step_times import StepTimes
from gateway.worker_pool.candidates import DecodeCandidate
from gateway.worker_pool.codec import StepTime
from gateway.worker_pool.local_prefill import LocalCandidate, LocalMode, choose_local
from gateway.worker_pool.router import Route, RouteRequest
from gateway.worker_pool.step_rates import StepRates

_CONTEXT = 512
"""Tokens of a stream in the steps that workers report."""
_CLASSES = 12
"""Size classes of reported steps: 1, 2, 4 tokens and so on."""


class LocalChoice:
    """The rule, with the step times that workers of such rates report."""

    def __init__(self, bounds: LocalBounds, times: StepTimes, prefill_chunk: int) -> None:
        self._bounds = bounds
        self._token_s = times.prefill_s([(prefill_chunk, 0)]) / prefill_chunk
        self._rates = StepRates()
        for number in range(_CLASSES):
            tokens = 1 << number
            seconds = times.step_s(tokens, _CONTEXT)
            if tokens >= bounds.chunk:  # a step with chunks of prompts, beside a stream
                seconds = times.step_s(1, _CONTEXT) + times.chunk_s([(tokens, 0)], beside=True)
            self._rates.record([StepTime(number, 1, seconds, tokens)])

    def choose(
        self,
        request: RouteRequest,
        remote: Route,
        decode: Sequence[DecodeCandidate],
        waiting_tokens: Sequence[int],
    ) -> Route | None:
        """Return the route of a decode worker alone if it is the better one."""
        bounds = self._bounds
        return choose_local(
            request,
            remote,
            [
                LocalCandidate(one, bounds.short, bounds.fallback, bounds.chunk, waiting, self._rates)
                for one, waiting in zip(decode, waiting_tokens, strict=True)
            ],
            LocalMode.AUTO,
            token_s=self._token_s,
            fall_back=False,
        )
