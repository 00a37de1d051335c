"""Grammar that an output must match, as text, and the error of one that cannot be used."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """The notations that workers compile; all others are translated by the gateway."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # the syntax of Rust's regex crate; the whole output matches
    LARK = "lark"  # as llguidance reads it, start rule `start`


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that is not compiled yet."""

    kind: Kind
    text: str = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Key of the grammar in caches: 32 bytes."""
        return hashlib.sha256(f"{self.kind.value}\n{self.text}".encode()).digest()


class BadGrammar(ValueError):
    """The grammar is wrong, impossible, or takes too much work. The message repeats nothing of it."""
