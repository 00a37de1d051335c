"""Help is taken where it makes steps of one stream faster, and tried again when things may have changed."""

from __future__ import annotations

from collections.abc import Callable

from engine.help_worth import PERIOD, TRIES, HelpWorth


def serve(help_worth: HelpWorth, steps: int, seconds: Callable[[bool], float], lag: int = 1) -> list[bool]:
    """Which steps were helped; each is told of when `lag` others have been asked for."""
    ways: list[bool] = []
    for number in range(steps):
        ways.append(help_worth.wanted())
        if number >= lag:
            way = ways[number - lag]
            help_worth.lasted(way, seconds(way))
    return ways


def test_the_faster_way_is_taken_between_trials() -> None:
    for faster in (True, False):
        ways = serve(HelpWorth(), 3 * PERIOD, lambda way, faster=faster: 2.0 if way is faster else 2.5)
        assert ways.count(faster) >= 3 * (PERIOD - TRIES - 1)
        assert ways.count(not faster) >= 3 * (TRIES - 1)


def test_what_becomes_slower_is_left_after_the_next_trial() -> None:
    help_worth = HelpWorth()
    serve(help_worth, PERIOD, lambda way: 3.0 if way else 2.0)
    ways = serve(help_worth, PERIOD, lambda way: 3.0 if way else 4.0)
    assert all(ways[3 * TRIES :])


def test_one_slow_step_of_a_trial_decides_nothing() -> None:
    times = iter([50.0, *[2.0] * (TRIES - 1), *[2.5] * (10 * PERIOD)])
    ways = serve(HelpWorth(), PERIOD, lambda way: next(times), lag=0)
    assert all(ways[2 * TRIES :])
