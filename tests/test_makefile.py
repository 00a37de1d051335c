"""What make leaves behind when something goes wrong."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HALFWAY = """#!/bin/sh
mkdir -p "$3/bin" && touch "$3/bin/python"
echo "ensurepip is not available" >&2
exit 1
"""


def test_a_venv_that_failed_halfway_is_not_taken_for_whole(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "venv"
    python.write_text(HALFWAY)
    python.chmod(0o755)
    make = ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/bin/python"]
    for _ in range(2):
        done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert "ensurepip is not available" in done.stderr
        assert not venv.exists()


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "mine"
    python.write_text(HALFWAY)
    python.chmod(0o755)
    (venv / "bin").mkdir(parents=True)
    (venv / "precious").touch()
    make = ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/bin/python"]
    assert subprocess.run(make, cwd=ROOT, capture_output=True, timeout=60).returncode != 0
    assert (venv / "precious").exists()
    assert not (venv / "bin" / "python").exists()


@pytest.mark.parametrize("ignore", [".dockerignore", ".gitignore"])
def test_no_venv_gets_into_an_image_or_the_repository(ignore: str) -> None:
    venvs = set(re.findall(r"^\w*VENV \??:?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    patterns = [line.rstrip("/") for line in (ROOT / ignore).read_text().splitlines()]
    assert len(venvs) == 3
    assert not [venv for venv in venvs if not any(fnmatch.fnmatch(venv, pattern) for pattern in patterns)]
