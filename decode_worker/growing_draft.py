"""Drafts that grow token after token, for all sequences together, until each has what is wanted of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from decode_worker.draft_walk import DraftWalk
from decode_worker.sequence import DecodeSequence

_log = logging.getLogger(__name__)


class GrowingDraft:
    """Draft of up to `count` tokens after a sequence."""

    def __init__(self, sequence: DecodeSequence, count: int) -> None:
        self.sequence = sequence
        self.count = count
        self.tokens: list[int] = []
        self.walk = DraftWalk(sequence)
        self._ended = False

    def add(self, token_id: int | None) -> None:
        """Take the token that was drawn, unless none was or the rules end the draft with it."""
        if token_id is None or not self.walk.follow(token_id):
            self._ended = True
        else:
            self.tokens.append(token_id)

    def goes_on(self, max_context: int) -> bool:
        """Return whether a further token is wanted."""
        after = self.sequence.num_tokens + len(self.tokens)
        return not self._ended and len(self.tokens) < self.count and after < max_context


class Growing(Protocol):
    """A draft of a sequence that is not complete."""

    @property
    def sequence(self) -> DecodeSequence:
        """The sequence after which it is drafted."""
        ...

    def goes_on(self, max_context: int) -> bool:
        """Return whether more is wanted."""
        ...


AnyDraft = TypeVar("AnyDraft", bound=Growing)


def grow(
    drafts: Sequence[AnyDraft], extend: Callable[[Sequence[AnyDraft]], None], max_context: int, drafter: str
) -> None:
    """Let `extend` add a token to each draft, again and again, while they go on.

    Where it fails, the log names the `drafter`, and the sequences whose drafts were growing get no more.
    """
    going = drafts
    try:
        while going:
            extend(going)
            going = [draft for draft in going if draft.goes_on(max_context)]
    except Exception:
        _log.exception("%s failed for %d sequences, which get no more drafts", drafter, len(going))
        for draft in going:
            draft.sequence.draft_computed = None
