"""Durations of a worker's steps by their size, from the times that it reports. Pure.

A worker reports the median of its recent steps by size class; what it reported last of a class stays until it
reports it again. Between two sizes a step's time is interpolated; beyond the largest it grows by `token_s`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.worker_pool.codec import StepTime

MANY_TOKENS = 32
"""Steps of at least so many tokens are bound by arithmetic: their time a token is the rate of prefill."""
LEAST_TOKEN_S = 1e-7
FIRST_TOKEN_S = 0.0005
"""Seconds a token before any such step was reported."""


class StepRates:
    """The step times of one worker, by size class."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[int, float]] = {}  # by class: tokens, seconds

    def record(self, times: Iterable[StepTime]) -> None:
        """Keep the times of a report, in place of older ones of the same classes."""
        self._steps.update({one.size_class: (one.tokens, one.median_s) for one in times if one.tokens})

    @property
    def token_s(self) -> float | None:
        """Seconds a token of the largest steps; None before a step of many tokens was reported."""
        tokens, seconds = self._steps[max(self._steps)] if self._steps else (0, 0.0)
        return seconds / tokens if tokens >= MANY_TOKENS else None

    def step_s(self, tokens: int, token_s: float) -> float:
        """Return the seconds of a step of so many tokens; ``token_s`` where no step of that size is known."""
        below, above = (0, 0.0), None
        for known in sorted(self._steps.values()):
            if known[0] <= tokens:
                below = known
            elif above is None:
                above = known
        more = tokens - below[0]
        if above is None:
            return below[1] + more * token_s
        return below[1] + more * (above[1] - below[1]) / (above[0] - below[0])


def prefill_token_s(workers: Iterable[StepRates]) -> float:
    """Return the seconds a token of the fastest worker that has reported steps of many tokens."""
    known = [rate for worker in workers if (rate := worker.token_s) is not None]
    return max(min(known, default=FIRST_TOKEN_S), LEAST_TOKEN_S)
