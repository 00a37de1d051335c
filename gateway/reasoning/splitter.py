"""Interface of reasoning splitters: token ids in, the same ids by the part of the answer they belong to out.

Splitting goes by tokens and not by text: a mark is recognised as a whole or not at all, so that no part of it
is ever shown, and a mark that is only spelled, as in an answer about marks, is text. Workers find the place
where a grammar begins by the same tokens (`diptych.runtime.grammar.reasoning_span`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from diptych.runtime.grammar.reasoning_span import ReasoningSpan


class Part(enum.Enum):
    """Part of an answer."""

    REASONING = enum.auto()
    CONTENT = enum.auto()


class Segment(NamedTuple):
    """Tokens that follow one another in a part."""

    part: Part
    token_ids: Sequence[int]


class ReasoningSplitter(Protocol):
    """Splitter of one output. Marks are in no segment."""

    reasoning_tokens: int
    """Tokens of reasoning so far, its marks included."""

    def push(self, token_ids: Sequence[int]) -> list[Segment]:
        """Add the next tokens; return the segments that are certain by now."""
        ...

    def finish(self) -> list[Segment]:
        """End the output: return what was held back."""
        ...


class Start(enum.Enum):
    """Place at which an output begins."""

    OPEN = enum.auto()  # the prompt has opened the reasoning
    BEFORE = enum.auto()  # the output may begin with it
    CLOSED = enum.auto()  # the prompt has ended it: the output is an answer


class ReasoningFormat(Protocol):
    """Form in which one model marks its reasoning."""

    @property
    def name(self) -> str: ...

    def start(self, prompt: str) -> Start:
        """Return where the output begins after a prompt that ends with this text."""
        ...

    def splitter(self, start: Start, *, constrained: bool) -> ReasoningSplitter:
        """Return a new splitter. ``constrained``: a grammar holds for the output after the reasoning."""
        ...

    def span(self, start: Start, *, forced: bool) -> ReasoningSpan:
        """Return the span that a grammar begins after. ``forced``: it is the grammar of forced calls."""
        ...
