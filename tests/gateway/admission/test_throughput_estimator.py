"""A rate is of busy time, and follows a change within seconds."""

from __future__ import annotations

import pytest

from gateway.admission.throughput_estimator import FIRST_S, ThroughputEstimator


def work(meter: ThroughputEstimator, per_s: float, start: float, seconds: float) -> float:
    now = start
    meter.begin(now)
    for _ in range(round(seconds * 10)):
        now += 0.1
        meter.done(per_s / 10, now, more=True)
    meter.done(0, now, more=False)
    return now


def test_nothing_is_said_too_early() -> None:
    meter = ThroughputEstimator()
    meter.begin(0.0)
    meter.done(50, FIRST_S / 2, more=True)
    assert meter.per_s is None
    meter.done(50, 2 * FIRST_S, more=True)
    assert meter.per_s == pytest.approx(100 / (2 * FIRST_S), rel=0.1)


@pytest.mark.parametrize("idle_s", [1, 5, 600])
def test_idle_time_does_not_count(idle_s: float) -> None:
    meter = ThroughputEstimator()
    now = work(meter, 1000, 0.0, 2)
    now = work(meter, 1000, now + idle_s, 2)
    assert meter.per_s == pytest.approx(1000, rel=0.05)


def test_what_was_slow_before_a_pause_is_forgotten() -> None:
    meter = ThroughputEstimator()
    now = work(meter, 10, 0.0, 30)
    meter.begin(now + 1)
    assert meter.per_s == pytest.approx(10, rel=0.1)
    meter.done(0, now + 1, more=False)
    meter.skip(now + 9)
    meter.begin(now + 10)
    assert meter.per_s is None


def test_it_follows_a_change() -> None:
    meter = ThroughputEstimator()
    now = work(meter, 1000, 0.0, 20)
    work(meter, 100, now, 10)
    assert meter.per_s is not None
    assert meter.per_s < 150
