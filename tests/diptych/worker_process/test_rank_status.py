"""The state of a process, as the kernel tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from diptych.worker_process.group.rank_status import process_state, rank_statuses


def test_a_worker_that_is_one_process_has_no_ranks() -> None:
    assert list(rank_statuses(None)) == []


def test_a_process_is_running_stopped_and_gone() -> None:
    assert process_state(os.getpid()) == "running"
    with subprocess.Popen(["sleep", "100"]) as process:
        for signum, expected in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "sleeping")):
            process.send_signal(signum)
            until = time.monotonic() + 60
            while process_state(process.pid) != expected:
                assert time.monotonic() < until
                time.sleep(0.01)
        process.kill()
    assert process_state(process.pid) == "gone"
