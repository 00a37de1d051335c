"""Closed loops of other lengths than the usual ones: what servers do with long prompts, or long answers.

Written IN+OUT@CLIENTS. Measured on servers that take any of them as they are started: Diptych and vLLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_WRITTEN = re.compile(r"(\d+)\+(\d+)@(\d+)")
_LOAD = re.compile(r"(\d+)\+(\d+) C=(\d+)")


@dataclass(frozen=True, order=True)
class Shape:
    """Prompt and answer in tokens, and how many clients ask."""

    input_len: int
    output_len: int
    clients: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a flag. Raises ValueError."""
        found = _WRITTEN.fullmatch(text)
        numbers = [int(number) for number in found.groups()] if found else [0]
        if not all(numbers):
            raise ValueError(f"{text!r}: not IN+OUT@CLIENTS, as in 512+128@16")
        return cls(*numbers)

    @classmethod
    def of_load(cls, load: str) -> Self | None:
        """Invert `load`; None for any other load."""
        found = _LOAD.fullmatch(load)
        return cls(*(int(number) for number in found.groups())) if found else None

    @property
    def load(self) -> str:
        """The name in a cell."""
        return f"{self.input_len}+{self.output_len} C={self.clients}"
