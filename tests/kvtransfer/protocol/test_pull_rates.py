"""Rates of pulls: which are made, for how long they may last, and what a failure does to them."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.pull_rates import (
    ASSUMED_COST,
    FORCED_DEADLINE_S,
    LEAST_DEADLINE_S,
    PROBE_EVERY,
    PullMode,
    PullRates,
)


def measured(pull_s: float, compute_s: float = 1.0, times: int = 10) -> PullRates:
    """Return rates after pulls and steps of 1,000 tokens."""
    rates = PullRates()
    for _ in range(times):
        rates.computed(1000, compute_s)
        rates.pulled(1000, pull_s)
    return rates


def test_unmeasured_pull_is_made_at_an_assumed_cost() -> None:
    rates = PullRates()
    assert rates.cost == ASSUMED_COST
    assert rates.pays()
    assert rates.deadline_s(100) == 1.0


def test_cost_is_the_ratio_of_the_times() -> None:
    assert measured(0.25).cost == pytest.approx(0.25)
    assert measured(0.25, compute_s=0.5).cost == pytest.approx(0.5)


def test_later_measurements_outweigh_earlier_ones() -> None:
    rates = measured(0.1)
    for _ in range(30):
        rates.pulled(1000, 0.9)
    assert 0.8 < rates.cost < 0.9


def test_pull_that_does_not_pay_is_probed_now_and_then() -> None:
    rates = measured(1.5)
    made = [rates.pays() for _ in range(3 * PROBE_EVERY)]
    assert made.count(True) == 3
    for _ in range(20):
        rates.pulled(1000, 0.1)
    assert all(rates.pays() for _ in range(10))


def test_one_stop_of_seconds_does_not_end_all_pulls() -> None:
    rates = measured(0.1)
    rates.pulled(1000, 3600.0)
    assert rates.pays()


def test_pulls_that_keep_failing_are_made_no_more() -> None:
    rates = measured(0.1)
    made = 0
    while rates.cost < 1 and made < 100:
        rates.failed(1000)
        made += 1
    assert 2 <= made <= 6


@pytest.mark.parametrize(
    ("mode", "pull_s", "expected", "made"),
    [
        ("auto", 1.5, 1.5, False),
        ("always", 1.5, 0.9, True),
        ("always", 0.1, 0.1, True),
        ("never", 0.1, None, False),
    ],
)
def test_mode_forces_or_forbids_pulls(
    mode: PullMode, pull_s: float, expected: float | None, made: bool
) -> None:
    rates = PullRates(mode)
    rates.computed(1000, 1.0)
    rates.pulled(1000, pull_s)
    assert rates.expected_cost == (None if expected is None else pytest.approx(expected))
    assert rates.pays() is made


def test_deadline_is_twice_the_time_of_computing() -> None:
    assert measured(0.1).deadline_s(1000) == pytest.approx(2.0)
    assert measured(0.1).deadline_s(1) == LEAST_DEADLINE_S
    assert PullRates("always").deadline_s(1) == FORCED_DEADLINE_S
