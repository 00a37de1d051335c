"""What holds for all tests, set before any of their modules is imported.

Where there is no NVIDIA GPU, Triton is told to interpret its kernels: it reads the variable when imported.

Hypothesis draws the same examples in every run of `make test`, so that a change is judged by what it changed.
`make test-full` and `make fuzz` draw new ones each time (profile `searching`). No example has a deadline: on
a machine shared with other work any of them can take any time, and pytest-timeout bounds the test.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What thousands of tests have imported stays to the end: a full collection took a second to walk it."""
    gc.collect()
    gc.freeze()
