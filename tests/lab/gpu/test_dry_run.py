"""Every line of the GPU benchmark runs: tiny, on the CPU, with the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED
from lab.gpu.__main__ import main, sections

QUICK = "ceilings"

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton is not in its interpreter")


@pytest.mark.parametrize(
    "section", [name if name == QUICK else pytest.param(name, marks=pytest.mark.full) for name in sections()]
)
@pytest.mark.timeout(900)
def test_a_section_gives_figures(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [part for name in dict.fromkeys(("ceilings", section)) for part in ("--only", name)]
    assert main(["--dry-run", "--results", str(tmp_path), *chosen]) == 0
    out = capsys.readouterr().out
    assert f"## {section} (" in out
    assert "Not measured" not in out
    assert not list(tmp_path.iterdir())
