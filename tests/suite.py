"""`python -m tests.suite`: the tests, then those few that failed once more by themselves.

Many tests run whole systems on real time, and a starved machine can fail one of them for no fault of the
code. So up to `FEW` failures get a second run alone. What fails there too fails the suite; what passes is
named at the end: a test that fails only in company is a defect, if only of the test.

Arguments are pytest's. Exit status as pytest's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FEW = 3
ROOT = Path(__file__).parents[1]
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
FAILED = 1  # pytest's status when tests ran and some failed


def run(arguments: list[str], root: Path = ROOT) -> int:
    """The tests under `root` with pytest's `arguments`; returns the exit status."""
    record = root / LAST_FAILED
    record.unlink(missing_ok=True)  # else failures of an earlier, smaller run would count as this one's
    status = _pytest(arguments, root)
    failed = sorted(json.loads(record.read_text())) if record.exists() else []
    if status != FAILED or not 0 < len(failed) <= FEW:
        return status
    print(f"\n{len(failed)} failed; once more, alone:", *failed, sep="\n  ", flush=True)
    status = _pytest([*arguments, "--last-failed"], root)
    if status == 0:
        print("\nfailed in company, passed alone:", *failed, sep="\n  ", flush=True)
    return status


def _pytest(arguments: list[str], root: Path) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=root, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
