"""Steps begin no more often than the pace allows; a step that is due has no pause."""

from __future__ import annotations

import pytest

from diptych.engine.step_pacing import StepPacing


def test_the_pause_is_a_part_of_the_step_before() -> None:
    pace = StepPacing(1.5)
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.020, 0.0) == pytest.approx(0.010)
    assert pace.pause_s(10.025, 0.0) == pytest.approx(0.005)
    pace.begin(10.030)
    pace.end(10.070)
    assert pace.pause_s(10.070, 0.0) == pytest.approx(0.020)


def test_a_step_that_follows_without_a_gap_is_measured_by_itself() -> None:
    pace = StepPacing(1.5)
    pace.begin(10.0)
    pace.end(10.020)
    pace.begin(10.020)  # of the one that was launched ahead
    assert pace.pause_s(10.020, 0.0) == pytest.approx(0.010)  # had there been none
    pace.end(10.060)
    assert pace.pause_s(10.060, 0.0) == pytest.approx(0.020)


def test_prompts_of_a_step_take_the_place_of_its_pause() -> None:
    pace = StepPacing(3.0)
    pace.begin(10.0)
    pace.end(10.020)
    pace.begin(10.060)
    pace.end(10.110, with_prompts=True)
    assert pace.pause_s(10.110, 0.0) == pytest.approx(0.010)  # 60 ms from its begin, as after any step
    pace.begin(10.120)
    pace.end(10.200, with_prompts=True)
    assert pace.pause_s(10.200, 0.0) == 0


def test_a_step_that_is_due_has_no_pause() -> None:
    pace = StepPacing(1.5)
    assert pace.pause_s(0.0, 0.0) == 0  # the first one
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.5, 0.0) == 0  # there was nothing to compute meanwhile


def test_without_a_stretch_steps_follow_each_other() -> None:
    pace = StepPacing(1.0)
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.pause_s(10.020, 60.0) == 0


@pytest.mark.parametrize(
    ("waited", "stretch"), [(0.0, 1.3), (0.5, 1.3), (0.75, 1.9), (1.0, 2.5), (60.0, 2.5)]
)
def test_the_pause_grows_with_the_wait(waited: float, stretch: float) -> None:
    pace = StepPacing(1.3, 2.5)
    pace.begin(10.0)
    pace.end(10.020)
    assert pace.stretch(waited) == pytest.approx(stretch)
    assert pace.pause_s(10.020, waited) == pytest.approx((stretch - 1) * 0.020)


def test_a_stretch_above_the_most_does_not_grow() -> None:
    assert StepPacing(3.0, 2.5).stretch(0.0) == StepPacing(3.0, 2.5).stretch(60.0) == 3.0
