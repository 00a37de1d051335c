"""Lateness of steps, by a worker's own measure."""

from __future__ import annotations

import pytest

from diptych.worker_process.step_watchdog import (
    FIRST_S,
    LEAST_S,
    MARGIN,
    RECENT_S,
    StepTime,
    StepWatchdog,
    size_class,
)


def stepped(clock: StepWatchdog, tokens: int, seconds: float, now: float) -> float:
    clock.begin(tokens, now)
    clock.end(now + seconds)
    return now + seconds


@pytest.mark.parametrize(("tokens", "kind"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (512, 9), (1023, 9)])
def test_classes_are_powers_of_two(tokens: int, kind: int) -> None:
    assert size_class(tokens) == kind


def test_the_first_step_may_be_slow_and_idle_time_is_not_late() -> None:
    clock = StepWatchdog()
    assert clock.late_s(1e9) == 0
    clock.begin(512, 0.0)
    assert clock.late_s(FIRST_S) == 0
    assert clock.late_s(FIRST_S + 2) == 2
    clock.end(FIRST_S + 2)
    assert clock.late_s(1e9) == 0


def test_lateness_is_measured_by_size_class() -> None:
    clock = StepWatchdog()
    now = stepped(clock, 512, 1.0, 0.0)
    now = stepped(clock, 1, 0.01, now)
    clock.begin(600, now)
    assert clock.late_s(now + MARGIN + 1) == pytest.approx(1)
    clock.end(now + 1)
    clock.begin(1, now)
    assert clock.late_s(now + LEAST_S + 1) == pytest.approx(1)


def test_a_failed_step_is_late_by_its_parts_and_not_recorded() -> None:
    clock = StepWatchdog()
    now = stepped(clock, 64, 1.0, 0.0)
    clock.retry(now)
    assert clock.late_s(1e9) == 0, "none is running"
    clock.begin(64, now)
    clock.retry(now + MARGIN)
    assert clock.late_s(now + 2 * MARGIN) == 0
    assert clock.late_s(now + 2 * MARGIN + 1) == pytest.approx(1)
    clock.end(now + 100)
    assert clock.times(now + 100) == []
    clock.begin(64, now)
    assert clock.late_s(now + MARGIN + 1) == pytest.approx(1)


def test_a_step_of_a_new_size_class_is_judged_by_its_size() -> None:
    clock = StepWatchdog()
    now = stepped(clock, 64, 1.0, 0.0)
    clock.begin(512, now)
    assert clock.late_s(now + MARGIN * 8) == 0
    assert clock.late_s(now + MARGIN * 8 + 1) == pytest.approx(1)


def test_times_are_medians_of_recent_steps() -> None:
    clock = StepWatchdog()
    stepped(clock, 1, 9.0, 0.0)
    now = 9.0 + RECENT_S + 1
    for seconds in (0.1, 0.3, 0.2):
        now = stepped(clock, 1, seconds, now)
    now = stepped(clock, 8, 0.5, now)
    assert clock.times(now) == [StepTime(0, 3, pytest.approx(0.2), 1), StepTime(3, 1, pytest.approx(0.5), 8)]
    assert clock.times(now + RECENT_S + 1) == []
