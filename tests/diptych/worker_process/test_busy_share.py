"""The share of a worker's time that its steps take."""

from diptych.worker_process.busy_share import WINDOW_S, BusyShare


def test_share_is_of_the_window() -> None:
    busy = BusyShare()
    assert busy.share(0.0) == 0.0
    for second in range(1, 11):
        busy.record(0.4, float(second))
    assert abs(busy.share(10.0) - 0.4) < 1e-9
    assert busy.share(10.0 + WINDOW_S) == 0.0


def test_share_is_never_above_one() -> None:
    busy = BusyShare()
    busy.record(3 * WINDOW_S, 1.0)
    assert busy.share(1.0) == 1.0
