"""Estimates of how long requests wait for admission, the bound of it, and hints to refused clients. Pure.

The rates are measured: whatever slows the workers down (blocks that run out, decode steps that share the
machine) shortens the queue that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.capacity import ThroughputEstimator

SMOOTHING = 0.05  # weight of one request in the averages
FIRST_RETRY_S = 1.0  # the retry hint while no rate was measured
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class MaxQueueDelay:
    """Bound of a request's wait, as predicted at its arrival.

    ``seconds``, or if None ``services`` times the duration of one prefill of average length. At 80% of its
    capacity a queue with random arrivals has up to ten services before the unluckiest percent (M/D/1).
    Four keep the workers busy and are gone soon after an overload ends.
    """

    seconds: float | None = None
    services: float = 4.0


class WaitEstimator:
    """Averages of past requests, and what they say of the next one's wait."""

    def __init__(self, max_delay: MaxQueueDelay | None = None) -> None:
        """Bound waits by `max_delay`; None: not at all."""
        self.rate = ThroughputEstimator()  # prompt tokens per second
        self._max_delay = max_delay or MaxQueueDelay(seconds=float("inf"))
        self._mean_tokens: float | None = None  # of a request
        self._mean_stay_s: float | None = None  # of a sequence, from admission to end
        self._promised_until = 0.0  # retry hints given so far end then

    def learn_tokens(self, tokens: int) -> None:
        """Count one more request of ``tokens`` prompt tokens."""
        self._mean_tokens = _smoothed(self._mean_tokens, tokens)

    def learn_stay(self, seconds: float) -> None:
        """Count one more sequence that was with the workers for ``seconds``."""
        self._mean_stay_s = _smoothed(self._mean_stay_s, seconds)

    @property
    def stay_known(self) -> bool:
        """True once a sequence has ended."""
        return self._mean_stay_s is not None

    def prefill_s(self, tokens: float) -> float:
        """Predict the seconds that the prefill workers need for ``tokens``; 0 while no rate was measured."""
        return 0.0 if self.rate.per_s is None else tokens / self.rate.per_s

    def places_s(self, stays: float) -> float:
        """Predict the seconds of ``stays`` sequences, one after the other; 0 while none was measured."""
        return stays * (self._mean_stay_s or 0.0)

    def allowed_s(self, tokens: int, prefill_workers: int) -> float:
        """Return the longest wait at which a request of ``tokens`` is accepted."""
        if self._max_delay.seconds is not None:
            return self._max_delay.seconds
        per_s = self.rate.per_s
        if per_s is None:
            return float("inf")
        return self._max_delay.services * prefill_workers * (self._mean_tokens or tokens) / per_s

    def hint_s(self, tokens: int, excess_s: float, now: float) -> float:
        """Return the seconds until there is room for ``tokens``, if refused clients retry at their hints."""
        per_s = self.rate.per_s
        if per_s is None:
            return FIRST_RETRY_S
        at = max(now + excess_s, self._promised_until)
        self._promised_until = min(at + tokens / per_s, now + LONGEST_RETRY_S)
        return min(max(at - now, SHORTEST_RETRY_S), LONGEST_RETRY_S)


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)
