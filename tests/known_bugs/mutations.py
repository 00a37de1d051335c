"""Known bugs of other inference servers, kept as patches that bring each of them into this code.

A known bug is a file in `patches/`: a few lines on where the bug was reported, what it did there and how it
looks here, then a unified diff. It is checked by applying the patch to a copy of the tree and running the
tests that it
names: they pass without the patch, and one must fail with it. A suite that stays green over such a patch
would not have noticed the bug either.
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
PATCHES = Path(__file__).parent / "patches"
NATIVE_STEP = Path("kernels/cpu/_step.so")
_FIELD = re.compile(r"^(Report|There|Here|Caught-by): +(.*(?:\n +.*)*)$", re.MULTILINE)
FAILED, PASSED = 1, 0  # pytest's exit status
TIMEOUT_S = 240.0
"""Seconds for the tests of one bug, which may show as a wait that does not end."""


class BadPatch(Exception):
    """A file without the required fields, or a patch that does not apply to the tree."""


@dataclass(frozen=True)
class KnownBug:
    """A bug, with the patch that brings it in and the tests that catch it.

    Attributes:
        report: address of the public report.
        there: what it did in the other server.
        here: what the patch does to this code.
        caught_by: tests, one of which must fail.
    """

    name: str
    report: str
    there: str
    here: str
    caught_by: tuple[str, ...]
    patch: Path

    @property
    def files(self) -> list[str]:
        """The files that the patch changes."""
        return re.findall(r"^\+\+\+ b/(\S+)$", self.patch.read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The result of a bug's tests; `detail` is the first test that failed, or the end of pytest's output."""

    bug: KnownBug
    caught: bool
    detail: str


def read_known_bugs() -> list[KnownBug]:
    """Return all known bugs, by name. Raises `BadPatch`."""
    return [_read(path) for path in sorted(PATCHES.glob("*.patch"))]


def _read(path: Path) -> KnownBug:
    fields = {name: " ".join(text.split()) for name, text in _FIELD.findall(path.read_text())}
    try:
        caught_by = tuple(fields["Caught-by"].split())
        return KnownBug(path.stem, fields["Report"], fields["There"], fields["Here"], caught_by, path)
    except KeyError as missing:
        raise BadPatch(f"{path.name} has no line {missing.args[0]}") from missing


def copy_tree(to: Path) -> None:
    """Copy the files that git tracks, as they are now, and the native step where it was built."""
    names = _run(["git", "ls-files", "-z"], ROOT).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    if (ROOT / NATIVE_STEP).exists():
        shutil.copy2(ROOT / NATIVE_STEP, to / NATIVE_STEP)


def apply_patch(bug: KnownBug, tree: Path) -> None:
    """Apply the patch. Raises `BadPatch`, and leaves the tree as it was, when it does not apply."""
    done = _run(["git", "apply", "--recount", "-C1", str(bug.patch)], tree, check=False)
    if done.returncode:
        raise BadPatch(f"{bug.name} does not apply: {done.stderr.strip()}")


def restore_files(bug: KnownBug, tree: Path) -> None:
    """Restore the changed files from the repository."""
    for name in bug.files:
        shutil.copy2(ROOT / name, tree / name)


def check(bug: KnownBug, tree: Path) -> Verdict:
    """Run the tests of a bug with its patch, in a copy of the tree that `copy_tree` made."""
    apply_patch(bug, tree)
    try:
        done = run_tests(bug.caught_by, tree)
    except subprocess.TimeoutExpired:
        return Verdict(bug, True, "the tests did not end")
    finally:
        restore_files(bug, tree)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Verdict(bug, done.returncode == FAILED, failures[0] if failures else done.stdout[-400:])


def run_tests(tests: tuple[str, ...], tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests in the tree until the first failure. Raises `subprocess.TimeoutExpired`."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def _run(command: list[str], where: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=check)
