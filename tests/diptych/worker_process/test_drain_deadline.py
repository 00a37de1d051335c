"""The times of a drain."""

from __future__ import annotations

from diptych.worker_process.server import HAND_BACK_S, DrainDeadline


def times(grace: DrainDeadline) -> tuple[float, float]:
    return grace.hand_back_at, grace.end_at


def test_half_of_the_grace_is_for_requests_handed_back() -> None:
    assert times(DrainDeadline(10, 100)) == (105, 110)
    assert times(DrainDeadline(0, 100)) == (100, 100 + HAND_BACK_S)


def test_shorten_never_extends_the_deadline() -> None:
    grace = DrainDeadline(600, 100)
    grace.shorten(10, 150)
    assert times(grace) == (155, 160)
    grace.shorten(10, 152)  # said again
    assert times(grace) == (155, 160)
    short = DrainDeadline(2, 100)
    short.shorten(10, 100.5)
    assert times(short) == (101, 102)


def test_shorten_after_the_hand_back_keeps_its_time() -> None:
    grace = DrainDeadline(600, 0)
    grace.shorten(10, 450)
    assert times(grace) == (300, 460)
