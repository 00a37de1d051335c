"""A process that is told to freeze has stopped when the test goes on, however slowly it does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults.failpoints import Armory

SLOW = """
import logging, time
from diptych.runtime.failpoints import reach

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.5)

logging.getLogger().addHandler(Slow())
reach("here")
print("went on")
"""


def test_who_is_told_to_freeze_has_stopped_before_it_is_told_to_go_on(tmp_path: Path) -> None:
    armory = Armory(tmp_path)
    armory.arm("here", "freeze")
    environment = {**os.environ, **armory.environment}
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert armory.wait_taken("here") == process.pid
            os.kill(process.pid, signal.SIGCONT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "went on\n")
