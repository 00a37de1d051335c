"""Fleets that a trace is replayed on, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.replay.result import ReplayResult

MOST_WORKERS = 1024


def parse_fleets(text: str) -> list[tuple[int, int]]:
    """Parse "2:2,1:3" or "8", which is every split of 8 workers, into pairs of prefill and decode workers.

    Raises ValueError.
    """
    fleets: list[tuple[int, int]] = []
    for part in text.split(","):
        left, colon, right = part.strip().partition(":")
        try:
            first = int(left)
            second = int(right) if colon else 0
        except ValueError:
            raise ValueError(f"{part!r} is neither PREFILL:DECODE nor a number of workers") from None
        if colon and not (first >= 1 and second >= 1):
            raise ValueError(f"{part!r}: both roles need a worker")
        if not colon and first < 2:
            raise ValueError(f"{part!r}: two workers at least, one of each role")
        if first + second > MOST_WORKERS:
            raise ValueError(f"{part!r}: at most {MOST_WORKERS} workers")
        fleets += [(first, second)] if colon else [(one, first - one) for one in range(1, first)]
    return list(dict.fromkeys(fleets))


def best_result(results: Sequence[ReplayResult]) -> ReplayResult:
    """Return the result of the greatest goodput a worker; of equal ones the first."""
    return max(results, key=lambda one: one.goodput_per_worker)


def greatest_rate(replay: Callable[[float], ReplayResult], start: float, share: float) -> ReplayResult:
    """Return the replay at the greatest rate at which `share` of the answers are within the service level.

    This is the goodput of DistServe (Zhong et al. 2024, section 2). The rate is found by doubling or halving
    from `start`, then by bisection to 3%. If no rate down to a thousandth of `start` is low enough, the last
    replay is returned.
    """
    rate, result = start, replay(start)
    factor = 2.0 if result.attainment >= share else 0.5
    while start / 1024 < rate < start * 1024:
        following = replay(rate * factor)
        rate *= factor
        if (following.attainment >= share) != (factor > 1):
            best = result if factor > 1 else following
            low = min(rate, rate / factor)
            return _bisect(replay, low, 2 * low, best, share)
        result = following
    return result


def _bisect(
    replay: Callable[[float], ReplayResult], low: float, high: float, best: ReplayResult, share: float
) -> ReplayResult:
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        result = replay(middle)
        if result.attainment >= share:
            low, best = middle, result
        else:
            high = middle
    return best
