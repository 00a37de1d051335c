"""Every kernel compiles for Hopper, to the instructions it was written for, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hopper_compiler.py"))],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "wgmma.mma_async" in done.stdout, "prefill runs on Hopper's own matrix instructions"
    assert "cvt.rn.satfinite.e4m3x2" in done.stdout, "rows are rounded to FP8 by the card's instruction"
    assert ".f32.e4m3.e4m3" in done.stdout, "attention in FP8 multiplies FP8"
