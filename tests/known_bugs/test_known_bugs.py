"""Every exhibit fits the tree; a few are shown in CI, all in the long form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.known_bugs import mutations as gallery

EXHIBITS = gallery.exhibits()
SMALL_FORM = {"last_blocks_given_away"}
"""One with quick tests; all of them: make museum."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tree")
    gallery.copy_tree(place)
    return place


def test_there_are_enough() -> None:
    assert len(EXHIBITS) >= 20
    assert len({exhibit.report for exhibit in EXHIBITS}) >= 20


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.name)
def test_fits(exhibit: gallery.Exhibit, tree: Path) -> None:
    """The patch applies, what it makes still compiles, and the tests it names are there."""
    gallery.bring_in(exhibit, tree)
    try:
        for name in exhibit.files:
            assert (tree / name).read_bytes() != (gallery.ROOT / name).read_bytes()
            compile((tree / name).read_text(), name, "exec")
    finally:
        gallery.take_out(exhibit, tree)
    for test in exhibit.caught_by:
        file, *names = test.split("::")
        text = (gallery.ROOT / file).read_text()
        assert not names or re.search(rf"^((async )?def |class |){names[0]}\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    "exhibit",
    [pytest.param(e, marks=() if e.name in SMALL_FORM else pytest.mark.full) for e in EXHIBITS],
    ids=lambda e: e.name,
)
def test_is_caught(exhibit: gallery.Exhibit, tree: Path) -> None:
    without = gallery.run_tests(exhibit.caught_by, tree)
    assert without.returncode == gallery.PASSED, without.stdout
    verdict = gallery.show(exhibit, tree)
    assert verdict.caught, verdict.said


def test_a_change_that_breaks_nothing_is_not_caught(tree: Path, tmp_path: Path) -> None:
    """The museum itself must be able to say no."""
    first = next(e for e in EXHIBITS if e.name == "half_a_stop_string")
    harmless = tmp_path / "harmless.patch"
    first_line, second_line = (gallery.ROOT / "gateway/output/stop_strings.py").read_text().splitlines()[:2]
    harmless.write_text(
        "--- a/gateway/output/stop_strings.py\n+++ b/gateway/output/stop_strings.py\n@@ -1,2 +1,2 @@\n"
        f"-{first_line}\n+{first_line} Nothing else.\n {second_line}\n"
    )
    exhibit = gallery.Exhibit("harmless", "", "", "", first.caught_by, harmless)
    assert not gallery.show(exhibit, tree).caught
