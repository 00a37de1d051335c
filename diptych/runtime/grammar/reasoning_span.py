"""Reasoning at the beginning of an output, by its tokens: where it ends, a grammar begins to hold.

Workers know token ids only, so the gateway says which ones mark the span. The place is a function of the
output's tokens alone: it is the same on every worker that follows an output from its first token, however
that is cut into pieces.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndMark:
    """Tokens that end a span: ``ids``, or these and all that follows up to the token ``until``."""

    ids: tuple[int, ...]
    until: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """Marks of a span.

    Attributes:
        open: the output begins within it.
        opens: else one of these tokens, the first of the output, opens it.
        ends: the first of these ends it.
        leads: one of these may come before the token that opens it, which then must follow: GLM-4.5 writes a
            line break first.
    """

    open: bool
    opens: tuple[int, ...]
    ends: tuple[EndMark, ...]
    leads: tuple[int, ...] = ()


class _Place(enum.Enum):
    BEFORE = enum.auto()
    OPENING = enum.auto()  # after a token that leads to it
    INSIDE = enum.auto()
    AFTER = enum.auto()


class SpanTracker:
    """Place of an output's end relative to its span."""

    def __init__(self, span: ReasoningSpan) -> None:
        self._span = span
        self._place = _Place.INSIDE if span.open else _Place.BEFORE
        self._longest = max((len(end.ids) for end in span.ends), default=0)
        self._recent: tuple[int, ...] = ()
        self._until: int | None = None

    @property
    def inside(self) -> bool:
        """True within the span, its end mark included."""
        return self._place is _Place.INSIDE

    @property
    def opening(self) -> bool:
        """True if the span is to be opened by the next token."""
        return self._place is _Place.OPENING

    @property
    def openers(self) -> tuple[int, ...]:
        """The tokens that would open the span now, or lead to it."""
        if self._place is _Place.BEFORE:
            return (*self._span.opens, *self._span.leads)
        return self._span.opens if self.opening else ()

    def push(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Follow the next tokens of the output; return those after the span."""
        for index, token_id in enumerate(token_ids):
            if self._place is _Place.BEFORE and token_id in self._span.leads:
                self._place = _Place.OPENING
            elif self._place in (_Place.BEFORE, _Place.OPENING):
                self._place = _Place.INSIDE if token_id in self._span.opens else _Place.AFTER
            elif self._place is _Place.INSIDE and self._ends_with(token_id):
                self._place = _Place.AFTER
                return token_ids[index + 1 :]
            if self._place is _Place.AFTER:
                return token_ids[index:]
        return ()

    def copy(self) -> SpanTracker:
        """Return a tracker at the same place, for an output that branches off this one."""
        same = SpanTracker(self._span)
        same._place, same._recent, same._until = self._place, self._recent, self._until
        return same

    def _ends_with(self, token_id: int) -> bool:
        if self._until == token_id:
            return True
        self._recent = (*self._recent, token_id)[-self._longest :]
        for end in self._span.ends:
            if self._recent[-len(end.ids) :] == end.ids:
                if end.until is None:
                    return True
                self._until = end.until
        return False
