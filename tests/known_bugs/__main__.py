"""`python -m tests.known_bugs`: shows every bug of the museum to the suite, and prints which were caught.

Ends with status 1 if the tests fail without a bug, or one was not caught.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.known_bugs import mutations as gallery


def main() -> int:
    """Run the whole museum; a line for each exhibit as it comes."""
    shown = gallery.exhibits()
    with tempfile.TemporaryDirectory(prefix="diptych-museum-") as place:
        tree = Path(place)
        gallery.copy_tree(tree)
        tests = tuple(sorted({test for exhibit in shown for test in exhibit.caught_by}))
        if (clean := gallery.run_tests(tests, tree)).returncode != gallery.PASSED:
            print(f"the tests fail without any bug:\n{clean.stdout[-2000:]}")
            return 1
        print("| bug | reported | caught by |\n|---|---|---|", flush=True)
        verdicts = []
        for exhibit in shown:
            verdict = gallery.show(exhibit, tree)
            said = f"`{verdict.said}`" if verdict.caught else f"**not caught**: {verdict.said}"
            print(f"| {exhibit.name.replace('_', ' ')} | {exhibit.report} | {said} |", flush=True)
            verdicts.append(verdict)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"\n{caught} of {len(verdicts)} caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
