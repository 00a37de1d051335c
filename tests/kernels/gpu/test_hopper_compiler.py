"""Every kernel compiles for Hopper, to the instructions it was written for, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(*what: str) -> str:
    """Return what the compiler says of the kernels, all of which compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hopper_compiler.py")), *what],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_hopper() -> None:
    found = compiled()
    assert "wgmma.mma_async" in found, "prefill runs on Hopper's own matrix instructions"
    assert "cvt.rn.satfinite.e4m3x2" in found, "rows are rounded to FP8 by the card's instruction"
    assert ".f32.e4m3.e4m3" in found, "attention in FP8 multiplies FP8"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("card", "most"), [("sm_90", 227 << 10), ("sm_80", 163 << 10)])
def test_kernels_of_recurrent_layers_fit_a_program(card: str, most: int) -> None:
    """A program has so many bytes of shared memory; the others of recurrent layers are among all kernels."""
    found = compiled("recurrent", "quick", card)
    sizes = [int(size) for size in re.findall(r"SHARED:(\d+)", found)]
    assert len(sizes) > 5
    assert max(sizes) <= most
    cases = dict(re.findall(r"^-- (.*)\n((?:(?!--).*\n?)*)", found, re.MULTILINE))
    again = [name for name in cases if "elsewhere" in name]
    assert len(again) > 5
    assert not any(cases[name] for name in again), "kernels are compiled anew where tables lie elsewhere"
    matrices = ".f32.tf32.tf32"
    assert matrices in found, "prompts are multiplied by matrix units"
