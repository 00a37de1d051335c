"""Bugs that other inference servers had, kept as patches that bring each of them into this code.

An exhibit is a file in `exhibits/`: a few lines that tell where the bug was reported, what it did there and
how it looks here, then a unified diff. It is shown by applying the patch to a copy of the tree and running
the tests that it names: they pass without the patch, and one must fail with it. A suite that stays green
over such a patch would not have noticed the bug either.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXHIBITS = Path(__file__).parent / "patches"
NATIVE_STEP = Path("kernels/cpu/_step.so")
_FIELD = re.compile(r"^(Report|There|Here|Caught-by): +(.*(?:\n +.*)*)$", re.MULTILINE)
FAILED, PASSED = 1, 0  # pytest's exit status
PATIENCE_S = 240.0
"""For the tests of one exhibit: a bug may show as a wait that does not end."""


class BadExhibit(Exception):
    """A file that is not an exhibit, or whose patch does not fit the tree any more."""


@dataclass(frozen=True)
class Exhibit:
    """One bug."""

    name: str
    report: str
    """Address of the public report."""
    there: str
    """What it did there."""
    here: str
    """What the patch does to this code."""
    caught_by: tuple[str, ...]
    """Tests, one of which must fail."""
    patch: Path

    @property
    def files(self) -> list[str]:
        """The files that the patch changes."""
        return re.findall(r"^\+\+\+ b/(\S+)$", self.patch.read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """How the suite took the bug."""

    exhibit: Exhibit
    caught: bool
    said: str
    """The first test that failed, or the end of pytest's output."""


def exhibits() -> list[Exhibit]:
    """All of them, by name. Raises `BadExhibit`."""
    return [_read(path) for path in sorted(EXHIBITS.glob("*.patch"))]


def _read(path: Path) -> Exhibit:
    fields = {name: " ".join(text.split()) for name, text in _FIELD.findall(path.read_text())}
    try:
        caught_by = tuple(fields["Caught-by"].split())
        return Exhibit(path.stem, fields["Report"], fields["There"], fields["Here"], caught_by, path)
    except KeyError as missing:
        raise BadExhibit(f"{path.name} has no line {missing.args[0]}") from missing


def copy_tree(to: Path) -> None:
    """The files that git follows, as they are now, and the native step where it was built."""
    names = _run(["git", "ls-files", "-z"], ROOT).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    if (ROOT / NATIVE_STEP).exists():
        shutil.copy2(ROOT / NATIVE_STEP, to / NATIVE_STEP)


def bring_in(exhibit: Exhibit, tree: Path) -> None:
    """Apply the patch. Raises `BadExhibit`, and leaves the tree as it was, when it does not fit."""
    done = _run(["git", "apply", "--recount", "-C1", str(exhibit.patch)], tree, check=False)
    if done.returncode:
        raise BadExhibit(f"{exhibit.name} does not fit any more: {done.stderr.strip()}")


def take_out(exhibit: Exhibit, tree: Path) -> None:
    """Bring the changed files back as they are in the repository."""
    for name in exhibit.files:
        shutil.copy2(ROOT / name, tree / name)


def show(exhibit: Exhibit, tree: Path) -> Verdict:
    """Run the exhibit's tests over its bug, in a copy of the tree that `copy_tree` made."""
    bring_in(exhibit, tree)
    try:
        done = run_tests(exhibit.caught_by, tree)
    except subprocess.TimeoutExpired:
        return Verdict(exhibit, True, "the tests did not end")
    finally:
        take_out(exhibit, tree)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Verdict(exhibit, done.returncode == FAILED, failures[0] if failures else done.stdout[-400:])


def run_tests(tests: tuple[str, ...], tree: Path) -> subprocess.CompletedProcess[str]:
    """Those tests, in the tree, until the first failure. Raises `subprocess.TimeoutExpired`."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def _run(command: list[str], where: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=check)
