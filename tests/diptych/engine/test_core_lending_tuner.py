"""The fastest share is found by trials, which are repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diptych.engine.step_pacing import PERIOD, SHARES, TRIES, CoreLendingTuner

TRIAL = TRIES * len(SHARES)


def serve(
    tuner: CoreLendingTuner, steps: int, seconds: Callable[[float], float], lag: int = 1
) -> list[float]:
    """Return the share of each step; a step is recorded once `lag` later shares have been chosen."""
    ways: list[float] = []
    for number in range(steps):
        ways.append(tuner.next_share())
        if number >= lag:
            way = ways[number - lag]
            tuner.record(way, seconds(way))
    return ways


@pytest.mark.parametrize("fastest", SHARES)
def test_the_fastest_share_is_used_between_trials(fastest: float) -> None:
    ways = serve(CoreLendingTuner(), 3 * PERIOD, lambda way: 2.0 + abs(way - fastest))
    assert ways.count(fastest) >= 3 * (PERIOD - TRIAL + TRIES - 1)
    for share in SHARES:
        assert ways.count(share) >= 3 * (TRIES - 1)


def test_a_share_that_becomes_slower_is_replaced_after_the_next_trial() -> None:
    tuner = CoreLendingTuner()
    serve(tuner, PERIOD, lambda way: 3.0 - way)
    ways = serve(tuner, PERIOD, lambda way: 3.0 + way)
    assert set(ways[TRIAL + TRIES :]) == {0.0}


def test_one_slow_step_of_a_trial_decides_nothing() -> None:
    times = iter([50.0, *[2.0] * (TRIES - 1), *[2.5] * (10 * PERIOD)])
    ways = serve(CoreLendingTuner(), PERIOD, lambda way: next(times), lag=0)
    assert set(ways[TRIAL:]) == {SHARES[0]}
