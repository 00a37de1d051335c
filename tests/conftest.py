"""What holds for all tests, set before any of their modules is imported.

Where there is no NVIDIA GPU, Triton is told to interpret its kernels: it reads the variable when imported.

Hypothesis draws the same examples in every run of `make test`, so that a change is judged by what it changed.
`make test-full` and `make fuzz` draw new ones each time (profile `searching`). No example has a deadline: on
a machine shared with other work any of them can take any time, and pytest-timeout bounds the test.

A shell without job control starts what it runs in the background with SIGINT ignored, and children inherit
that. Commands that tests interrupt would run on, so SIGINT has its usual handler here.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads of torch that wait for one another sleep: the lanes share the cores, and what spins there takes from
# both. Reading the bundled model took seven times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else a line for every server that ends under its clients
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def _close_stderr_of_triton() -> None:
    """Point standard error at nothing once all else has ended, if Triton was loaded.

    Its bindings (nanobind, without a switch that Python could reach) list hundreds of "leaked" functions as
    the interpreter goes down. The programs of the product end before that (`diptych.runtime.process.leave`).
    """
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_close_stderr_of_triton)  # the first one here, so the last one to run


def pytest_collection_finish() -> None:
    """What thousands of tests have imported stays to the end: a full collection took a second to walk it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Let torch compute on one thread where a test sets no other number.

    The lanes share the cores, and most matrices are too small to be divided.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
