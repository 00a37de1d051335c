"""The known bugs: every patch applies; a few are checked in CI, all in the long form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.known_bugs import mutations

BUGS = mutations.read_known_bugs()
SMALL_FORM = {"last_blocks_given_away"}
"""Bugs with quick tests, checked in CI; all of them: make known-bugs."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    mutations.copy_tree(folder)
    return folder


def test_at_least_twenty_reported_bugs_are_kept() -> None:
    assert len(BUGS) >= 20
    assert len({bug.report for bug in BUGS}) >= 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_patch_applies_and_names_existing_tests(bug: mutations.KnownBug, tree: Path) -> None:
    mutations.apply_patch(bug, tree)
    try:
        for name in bug.files:
            assert (tree / name).read_bytes() != (mutations.ROOT / name).read_bytes()
            compile((tree / name).read_text(), name, "exec")
    finally:
        mutations.restore_files(bug, tree)
    for test in bug.caught_by:
        file, *names = test.split("::")
        text = (mutations.ROOT / file).read_text()
        assert not names or re.search(rf"^((async )?def |class |){names[0]}\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=() if bug.name in SMALL_FORM else pytest.mark.full) for bug in BUGS],
    ids=lambda bug: bug.name,
)
def test_bug_is_caught_by_its_tests(bug: mutations.KnownBug, tree: Path) -> None:
    without = mutations.run_tests(bug.caught_by, tree)
    assert without.returncode == mutations.PASSED, without.stdout
    verdict = mutations.check(bug, tree)
    assert verdict.caught, verdict.detail


def test_harmless_patch_is_not_caught(tree: Path, tmp_path: Path) -> None:
    """The check itself must be able to fail."""
    first = next(bug for bug in BUGS if bug.name == "half_a_stop_string")
    harmless = tmp_path / "harmless.patch"
    path = "gateway/output/stop_strings.py"
    first_line, second_line = (mutations.ROOT / path).read_text().splitlines()[:2]
    harmless.write_text(
        f"--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n"
        f"-{first_line}\n+{first_line} Nothing else.\n {second_line}\n"
    )
    bug = mutations.KnownBug("harmless", "", "", "", first.caught_by, harmless)
    assert not mutations.check(bug, tree).caught
