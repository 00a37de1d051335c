"""Runner of all tests (`python -m tests.suite`): three lanes at once, then the few that failed again, alone.

The first lane starts systems of many processes, one system after the other. The second starts single programs
and servers, and waits for them as often as it computes, and runs what else keeps both lanes equally long. The
third stays in its own process and keeps one core busy. Each is a pytest of its own, and its lines carry its
name. Where tests are named on the command line there is one lane.

Many tests run on real time, and a starved machine can fail one of them for no fault of the code. So up to
`FEW` failures get a second run, with nothing beside them, and what fails there a third. What fails in all of
them fails the suite; what passes is named at the end: a test that fails only in company is a defect, if only
of the test.

Arguments are pytest's. The exit status is pytest's, that of the worse lane.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread

FEW = 25
TIMES_ALONE = 2
ROOT = Path(__file__).parents[1]
LANES = {
    "systems": ("tests/end_to_end", "tests/faults"),
    "programs": (
        *("tests/diptych/cli", "tests/diptych/bench", "tests/gateway", "tests/deploy", "tests/lab"),
        *("tests/kvtransfer", "tests/decode_worker", "tests/prefill_worker", "tests/simulation"),
    ),
}
REST = "parts"
FAILED, NONE_FOUND = 1, 5  # pytest's statuses: some tests failed, there were none


class Lane:
    """Pytest process over a part of the tests, with a record of failures of its own."""

    def __init__(self, name: str, selection: list[str], root: Path = ROOT) -> None:
        self.name = name
        self.status = 0
        self._selection = selection
        self._root = root
        self._cache = f".pytest_cache/{name}"
        self._record = root / self._cache / "v/cache/lastfailed"

    @property
    def failed(self) -> list[str]:
        return sorted(json.loads(self._record.read_text())) if self._record.exists() else []

    def forget(self) -> None:
        """Remove the record of an earlier, smaller run, whose failures would count as this one's."""
        self._record.unlink(missing_ok=True)

    def run(self, arguments: list[str]) -> None:
        """Print the lines of pytest's output with the lane's name, and keep its exit status."""
        options = [*self._selection, "-o", f"cache_dir={self._cache}", *arguments]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options],
            cwd=self._root,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{self.name}| {line}", end="", flush=True)
        self.status = process.returncode


def lanes(arguments: list[str], root: Path = ROOT) -> list[Lane]:
    """Return all lanes, or one if the arguments name files or folders of tests."""
    named = any((root / argument.partition("::")[0]).exists() for argument in arguments)
    found = {name: [path for path in paths if (root / path).exists()] for name, paths in LANES.items()}
    taken = [path for paths in found.values() for path in paths]
    if named or not taken:
        return [Lane("tests", [], root)]
    own = [Lane(name, paths, root) for name, paths in found.items() if paths]
    return [*own, Lane(REST, [f"--ignore={path}" for path in taken], root)]


def run(arguments: list[str], root: Path = ROOT) -> int:
    """Run the tests under `root` with pytest's `arguments`; return the exit status."""
    chosen = lanes(arguments, root)
    for lane in chosen:
        lane.forget()
    threads = [Thread(target=lane.run, args=(arguments,)) for lane in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = _worst(chosen)
    failed = [name for lane in chosen for name in lane.failed]
    if status != FAILED or not 0 < len(failed) <= FEW:
        return status
    for _ in range(TIMES_ALONE):
        if status == FAILED:
            status = _once_more([lane for lane in chosen if lane.status == FAILED], arguments)
    if status == 0:
        print("\nfailed in company, passed alone:", *failed, sep="\n  ", flush=True)
    return status


def _once_more(failing: list[Lane], arguments: list[str]) -> int:
    """Run the failed tests of these lanes again, one lane after the other; return the exit status."""
    failed = [name for lane in failing for name in lane.failed]
    print(f"\n{len(failed)} failed; once more, alone:", *failed, sep="\n  ", flush=True)
    for lane in failing:
        lane.run([*arguments, "--last-failed"])
    return _worst(failing)


def _worst(chosen: list[Lane]) -> int:
    """Return the worse exit status, broken before failed; a lane without tests does not count."""
    statuses = {lane.status for lane in chosen}
    if statuses == {NONE_FOUND}:
        return NONE_FOUND
    others = sorted(statuses - {0, FAILED, NONE_FOUND}, key=abs)
    return others[-1] if others else FAILED if FAILED in statuses else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
