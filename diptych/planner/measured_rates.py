"""Times of prompts and decode steps from loads that `diptych bench` measured.

Closed loops of C clients are read. With T seconds from a client's request to its next (C over the rate), a
prompt of P seconds and an answer of D seconds after it:

lone prompts        a straight line through P by the prompt's tokens, of the loads with the fewest clients
prompts beside      P of the fewest clients that are several, over the line: decode steps take cores from it,
                    for the share of the prompt in which another client has its answer, D / (T - P) each
batch               1 + (C - 1) D / T, as a stream sees it
share beside        (C - 1) P' / (T - P), at most 1: the part of a stream's time in which another's prompt is
                    computed. P' is the line's time beside steps; one worker computes prompts in turn, so
                    that none falls into the stream's own
steps               a straight line over the batch, and the factor on steps beside prompts: a stream whose
                    steps take f times as long for a share s of its time has TPOT / (1 - s + s / f)
keys and values     what a token of context adds for each stream: the line's value for no stream is the time
                    in which the weights are read, and keys and values are read at the same rate

The server's own P is taken where it reports it (`median_server_prefill_ms`), else the time to the first
token. Without it what phases take from one another stays in the lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_LEAST_LOADS: Final = 4
"""Different loads that a line and a factor can be fitted to."""
_FACTORS: Final = tuple(1 + step / 20 for step in range(41))
"""Factors on steps beside prompts that are tried: from 1 to 3."""
_ROUNDS: Final = 4
"""Times that the line is fitted to what context leaves of it: context's part hardly changes it."""
_Line = tuple[float, float]
"""Value at 0, and slope."""


class BadMeasurements(ValueError):
    """Results that no rates can be read from. The message says what is missing."""


@dataclass(frozen=True)
class Measured:
    """Rates fitted to loads of `diptych bench`, in seconds.

    A prompt takes `prefill_base + prefill_per_token * new`, a step `step_base + (step_per_stream +
    step_per_context * context) * batch`, each while the other phase does not compute.
    """

    prefill_base: float
    prefill_per_token: float
    step_base: float
    step_per_stream: float
    overhead_s: float = 0.0
    """Time of a first token beyond its prompt's computation; 0 where the server does not tell them apart."""
    prompts_beside: float = 1.0
    """Factor on a prompt's time while decode steps are computed: above 1 where both share a machine."""
    steps_beside: float = 1.0
    """Factor on a decode step's time while a prompt is computed."""
    step_per_context: float = 0.0
    """Time of a step for each token of a stream's context."""

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        return self.prefill_base + self.prefill_per_token * new_tokens

    def step_s(self, batch: float, context: float) -> float:
        return self.step_base + (self.step_per_stream + self.step_per_context * context) * batch

    @classmethod
    def of_results(cls, results: Sequence[Mapping[str, Any]], kv_share: float = 0.0) -> Measured:
        """Fit loads of a file that `diptych bench --save-result` wrote. Raises BadMeasurements.

        `kv_share` is the bytes of a token's keys and values over those that a lone step reads of the weights.
        """
        loads = [_load(number, one) for number, one in enumerate(results)]
        if not loads:
            raise BadMeasurements("the file holds no load")
        fewest = min(load.clients for load in loads)
        lone = [load for load in loads if load.clients == fewest]
        prompts = _line([(load.input, load.prompt_s) for load in lone], through_zero=True)
        overhead_s = max(statistics.median(load.ttft_s - load.prompt_s for load in lone), 0.0)
        if (
            any(load.server_s is None for load in loads)
            or len({_kind(load) for load in loads}) < _LEAST_LOADS
        ):
            steps, context_s = _step_line(loads, [load.tpot_s for load in loads], kv_share)
            return cls(*prompts, *steps, overhead_s, step_per_context=context_s)
        prompts_beside = _prompts_beside([load for load in loads if load.clients > fewest], prompts)
        factor, steps, context_s = _fit_steps(loads, prompts, prompts_beside, kv_share)
        return cls(*prompts, *steps, overhead_s, prompts_beside, factor, context_s)


@dataclass(frozen=True)
class _Load:
    clients: float
    input: float
    output: float
    rate: float
    """Requests a second."""
    ttft_s: float
    tpot_s: float
    server_s: float | None
    """The server's own time of a prompt; None where it reports none."""

    @property
    def prompt_s(self) -> float:
        """Seconds of a prompt: the server's, or else all until the first token."""
        return self.ttft_s if self.server_s is None else self.server_s

    @property
    def others(self) -> float:
        """Clients beside one."""
        return max(self.clients - 1, 0.0)

    @property
    def batch(self) -> float:
        """Streams of a step on average, as one of them sees it."""
        return 1 + self.others * self._share((self.output - 1) * self.tpot_s)

    def share_beside(self, prompt_s: float) -> float:
        """Return the share of a stream's time in which another client's prompt of `prompt_s` is computed."""
        own = self._share(self.prompt_s)
        return 1.0 if own >= 1 else min(self.others * self._share(prompt_s) / (1 - own), 1.0)

    @property
    def answer_share_beside(self) -> float:
        """Share of a prompt's time in which another client has its answer; the other's prompt waits then."""
        other = self._share((self.output - 1) * self.tpot_s) / max(1 - self._share(self.prompt_s), 1e-9)
        return 1 - math.pow(1 - min(other, 1.0), self.others)

    @property
    def context(self) -> float:
        """Tokens of a stream's context on average."""
        return self.input + self.output / 2

    def _share(self, seconds: float) -> float:
        """Return the share of a client's time that `seconds` of each of its requests are."""
        return min(seconds * self.rate / self.clients, 1.0)


def _kind(load: _Load) -> tuple[float, float]:
    return load.clients, load.input


def _prompts_beside(more: Sequence[_Load], prompts: _Line) -> float:
    """Return how much longer a prompt takes beside decode steps, by the server's times.

    Taken are the fewest clients that are several, as more make prompts wait for one another, and of these
    the longest prompts, beside which hardly anything else counts.
    """
    if not more:
        return 1.0
    chosen = min(more, key=lambda load: (load.clients, -load.input))
    longer = chosen.prompt_s / (prompts[0] + prompts[1] * chosen.input) - 1
    beside = chosen.answer_share_beside
    return 1 + max(longer, 0.0) / beside if beside else 1.0


def _fit_steps(
    loads: Sequence[_Load], prompts: _Line, prompts_beside: float, kv_share: float
) -> tuple[float, _Line, float]:
    """Return the factor on steps beside prompts, the line of steps that are alone, and a token's context.

    The factor is the one with which the times of lone steps lie best on a line, by relative error.
    """
    shares = [load.share_beside(prompts_beside * (prompts[0] + prompts[1] * load.input)) for load in loads]

    def fit(factor: float) -> tuple[float, _Line, float]:
        times = [
            load.tpot_s * (1 - share + share / factor) for load, share in zip(loads, shares, strict=True)
        ]
        (base, slope), context_s = _step_line(loads, times, kv_share)
        error = math.fsum(
            ((base + (slope + context_s * load.context) * load.batch) / seconds - 1) ** 2
            for load, seconds in zip(loads, times, strict=True)
        )
        return error, (base, slope), context_s

    factor = min(_FACTORS, key=lambda one: fit(one)[0])
    return factor, *fit(factor)[1:]


def _step_line(loads: Sequence[_Load], times: Sequence[float], kv_share: float) -> tuple[_Line, float]:
    """Return the line of steps over the batch, and what each token of context adds for a stream."""
    context_s = 0.0
    for _ in range(_ROUNDS):
        points = [
            (load.batch, seconds - context_s * load.context * load.batch)
            for load, seconds in zip(loads, times, strict=True)
        ]
        line = _line(points, through_zero=False)
        context_s = kv_share * line[0]
    return line, context_s


def _load(number: int, result: Mapping[str, Any]) -> _Load:
    try:
        prefill_ms = result.get("mean_server_prefill_ms")
        completed = float(result["completed"])
        return _Load(
            clients=float(result["max_concurrency"] or result["concurrency"]),
            input=float(result["total_input_tokens"]) / completed,
            output=float(result["total_output_tokens"]) / completed,
            rate=float(result["request_throughput"]),
            ttft_s=float(result["mean_ttft_ms"]) / 1000,
            tpot_s=float(result["mean_tpot_ms"]) / 1000,
            server_s=None if prefill_ms is None else float(prefill_ms) / 1000,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadMeasurements(f"load {number} of the file has no usable {error}") from error


def _line(points: Sequence[tuple[float, float]], *, through_zero: bool) -> _Line:
    """Return (value at 0, slope) of least squares; of a single abscissa, one of the two is 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return (0.0, mean_y / mean_x) if through_zero else (mean_y, 0.0)
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope
