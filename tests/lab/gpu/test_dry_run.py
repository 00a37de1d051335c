"""Every line of the GPU benchmark runs: tiny, on the CPU, with the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED
from kernels.gpu.package_tiles import FILE
from lab.gpu.__main__ import main, sections
from lab.gpu.tune import main as tune

QUICK = "ceilings"
PACKAGE_BEFORE = FILE.read_text()

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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tuner_tries_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "paged_prefill: {" in out
    assert "experts, few rows: {" in out
    assert FILE.read_text() == PACKAGE_BEFORE, "a dry run keeps nothing"
