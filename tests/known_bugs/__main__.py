"""`python -m tests.known_bugs`: checks that the suite catches every known bug, and prints a table.

Ends with status 1 if the tests fail without a bug, or one was not caught.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.known_bugs import mutations


def main() -> int:
    """Check all known bugs; print a line for each as it is done."""
    bugs = mutations.read_known_bugs()
    with tempfile.TemporaryDirectory(prefix="diptych-known-bugs-") as folder:
        tree = Path(folder)
        mutations.copy_tree(tree)
        tests = tuple(sorted({test for bug in bugs for test in bug.caught_by}))
        if (clean := mutations.run_tests(tests, tree)).returncode != mutations.PASSED:
            print(f"the tests fail without any bug:\n{clean.stdout[-2000:]}")
            return 1
        print("| bug | reported | caught by |\n|---|---|---|", flush=True)
        verdicts = []
        for bug in bugs:
            verdict = mutations.check(bug, tree)
            detail = f"`{verdict.detail}`" if verdict.caught else f"**not caught**: {verdict.detail}"
            print(f"| {bug.name.replace('_', ' ')} | {bug.report} | {detail} |", flush=True)
            verdicts.append(verdict)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"\n{caught} of {len(verdicts)} caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
