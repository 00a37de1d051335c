"""Documents for strangers: how long their parts may be, and where their links lead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"log", "_build"} & set(page.parts)]
TOP = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
README_LINES, README_NUMBERS, PARAGRAPH_WORDS, CELL_WORDS = 150, 60, 120, 30


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def paragraphs(text: str) -> list[str]:
    """Return what stands between empty lines, list items apart, tables left out."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_code(text))
    return [part for part in parts if not part.lstrip().startswith("|")]


def cells(text: str) -> list[str]:
    rows = [line for line in without_code(text).splitlines() if line.startswith("|")]
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]


def test_the_readme_has_at_most_150_lines_and_60_numbers() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= README_LINES
    numbers = re.findall(r"(?<![\w.])\d[\d.,]*", without_code(text))
    assert len(numbers) <= README_NUMBERS, numbers


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=name_of)
def test_paragraphs_and_cells_are_short(page: Path) -> None:
    text = page.read_text()
    assert [part for part in paragraphs(text) if len(part.split()) > PARAGRAPH_WORDS] == []
    assert [cell for cell in cells(text) if len(cell.split()) > CELL_WORDS] == []


def test_the_lengths_are_seen() -> None:
    """The control: a long paragraph and a long cell are found."""
    text = "word " * 121 + "\n\n| " + "word " * 31 + "|\n"
    assert any(len(part.split()) > PARAGRAPH_WORDS for part in paragraphs(text))
    assert any(len(cell.split()) > CELL_WORDS for cell in cells(text))


@pytest.mark.parametrize(
    "page", [*TOP, *PAGES, ROOT / "lab/README.md", ROOT / "deploy/README.md"], ids=name_of
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Headings are named as GitHub names them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if heading:
            lines = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            names = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]
            assert heading in names, f"{name_of(page)}: {target}"


def test_the_references_are_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
