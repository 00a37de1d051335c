"""Steps begin no more often than the pace allows; what is due waits for nobody."""

from __future__ import annotations

import pytest

from decode_worker.pace import Pace


def test_the_cores_are_left_for_a_part_of_the_step_that_is_over() -> None:
    pace = Pace(1.5)
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.020) == pytest.approx(0.010)
    assert pace.pause_s(10.025) == pytest.approx(0.005)
    pace.begin(10.030)
    pace.end(10.070)
    assert pace.pause_s(10.070) == pytest.approx(0.020)


def test_a_step_that_is_due_waits_for_nobody() -> None:
    pace = Pace(1.5)
    assert pace.pause_s(0.0) == 0  # the first one
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.5) == 0  # there was nothing to compute meanwhile


def test_without_a_stretch_steps_follow_each_other() -> None:
    pace = Pace(1.0)
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.020) == 0
