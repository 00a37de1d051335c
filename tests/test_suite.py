"""Runs after the first forgive what passes alone, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import suite

BROKEN = "def test_broken(): assert False\n"
PASSES_AT = """
from pathlib import Path

def test_in_company():
    runs = Path("runs")
    before = runs.read_text() if runs.exists() else ""
    runs.write_text(before + ".")
    assert len(before) >= {failures}
"""
IN_COMPANY = PASSES_AT.format(failures=1)


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the suites of these tests without plugins, whose import takes longer than all they test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({"test_a.py": "def test_fine(): pass\n", "test_b.py": IN_COMPANY}, 0),
        ({"test_b.py": PASSES_AT.format(failures=suite.TIMES_ALONE)}, 0),
        ({"test_b.py": PASSES_AT.format(failures=suite.TIMES_ALONE + 1)}, 1),
        ({"test_a.py": BROKEN, "test_b.py": IN_COMPANY}, 1),
        ({"test_a.py": "import no_such_module\n"}, 2),
        ({"test_a.py": "def test_fine(): pass\n"}, 0),
    ],
)
def test_suite_forgives_only_what_passes_alone(files: dict[str, str], status: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert suite.run(["-q"], tmp_path) == status


def test_commands_can_be_interrupted_though_the_suite_runs_in_the_background() -> None:
    """A shell starts background commands with SIGINT ignored."""
    child = "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    call = f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    starter = f"import subprocess, sys, tests.conftest\n{call}"
    command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable]
    assert subprocess.run([*command, child], cwd=suite.ROOT, check=False).returncode == 1  # it is inherited
    assert subprocess.run([*command, starter], cwd=suite.ROOT, check=False).returncode == 0


def test_both_lanes_run_and_count(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in ("tests/faults", "tests/diptych/engine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/faults/test_system.py").write_text("def test_system(): pass\n")
    (tmp_path / "tests/diptych/engine/test_part.py").write_text(IN_COMPANY)
    assert suite.run(["-q"], tmp_path) == 0
    out = capfd.readouterr().out
    assert "systems| 1 passed" in out
    assert "parts| 1 failed" in out
    assert "passed alone" in out
    assert suite.run(["-q", "-k", "nothing"], tmp_path) == suite.NONE_FOUND
    assert suite.run(["-q", "tests/diptych/engine/test_part.py"], tmp_path) == 0
    assert "tests| 1 passed" in capfd.readouterr().out


def test_many_failures_are_not_run_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for n in range(suite.FEW + 1):
        (tmp_path / f"test_{n}.py").write_text(f"def test_{n}(): assert False\n")
    assert suite.run(["-q"], tmp_path) == suite.FAILED
    assert "once more" not in capfd.readouterr().out
