"""The text that models are judged on, and the windows that it is cut into."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """English prose and where it comes from."""

    content: str
    source: str
    licence: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


class TooShort(ValueError):
    """The text has fewer tokens than the windows need."""


def python_reference() -> Text:
    """Return the chapters of the Python language reference that every CPython carries for `help()`.

    Prose of several authors with code in it, some 110,000 tokens. It differs a little between Python
    versions: compare figures of equal digests only.
    """
    from pydoc_data.topics import topics

    return Text(
        content="\n\n".join(topics[name] for name in sorted(topics)),
        source=f"The Python Language Reference (pydoc_data.topics of CPython {sys.version.split()[0]})",
        licence="PSF-2.0",
    )


def text_file(path: Path) -> Text:
    """Read a UTF-8 file. Raises OSError or UnicodeDecodeError."""
    return Text(path.read_text(encoding="utf-8"), source=path.name, licence="as given by its owner")


def windows(token_ids: Sequence[int], count: int, length: int) -> list[Sequence[int]]:
    """`count` pieces of `length` tokens that do not overlap, spread evenly over the whole text.

    Raises TooShort, and ValueError for windows of one token, which predict nothing.
    """
    if count < 1 or length < 2:
        raise ValueError("windows need two tokens, and there must be one")
    if len(token_ids) < count * length:
        raise TooShort(f"{len(token_ids)} tokens of text; {count} windows of {length} need {count * length}")
    starts = [index * (len(token_ids) - length) // max(1, count - 1) for index in range(count)]
    return [token_ids[start : start + length] for start in starts]
