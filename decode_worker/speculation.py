"""Speculative decoding: a step computes drafted tokens too, and shows which of them were right.

After a sequence's last token the step computes those that a drafter expects to follow (Leviathan et al.,
2023, arXiv:2211.17192). Each position is drawn from the model's own logits with the random numbers that
belong to it, as it would be in a step of its own; what was drafted stands up to the first token that is not
the one drawn. So drafts change no output, whatever it is sampled with, where a row's numbers do not depend on
what else the step computes. They are worth it where a step waits for memory and not for arithmetic: with few
sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from decode_worker.sequence import DecodeSequence
from decode_worker.step_group import Row

_log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Who expects tokens."""

    def draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        """At most `count` tokens that may follow what `sequence` has; none where there is nothing to say."""
        ...

    def rests(self, sequence: DecodeSequence) -> bool:
        """Whether it will have nothing to say for the next tokens, so that steps may be launched ahead."""
        ...


class Speculation:
    """How much of a step drafts may be."""

    def __init__(self, drafter: Drafter, *, most: int, tokens: int, block_size: int) -> None:
        """`most` drafted tokens a sequence; `tokens` a step, those that are no drafts included."""
        self._drafter = drafter
        self._most = most
        self._tokens = tokens
        self._block_size = block_size

    def draft(self, rows: Sequence[Row]) -> None:
        """Give each sequence its draft for the step that is laid out; none of their tokens may be unknown."""
        room = self._room(len(rows))
        for gang, sequence in rows:
            count = min(room, gang.draftable(sequence), self._lanes_left(sequence))
            sequence.draft = self._draft(sequence, count) if count > 0 else []

    def waits(self, rows: Sequence[Row]) -> bool:
        """Whether the step after one of `rows` has to know their tokens: they have drafts, or will have."""
        if any(sequence.draft for _, sequence in rows):
            return True
        return self._room(len(rows)) > 0 and any(
            gang.draftable(sequence) > 0 and not self._drafter.rests(sequence) for gang, sequence in rows
        )

    def _draft(self, sequence: DecodeSequence, count: int) -> list[int]:
        """A drafter that fails costs its drafts and nothing else."""
        try:
            return list(self._drafter.draft(sequence, count))[:count]
        except Exception:
            _log.exception("a sequence of %d tokens got no draft", sequence.num_tokens)
            return []

    def _room(self, sequences: int) -> int:
        """Tokens that each of so many may have drafted."""
        return min(self._most, max(self._tokens // sequences - 1, 0))

    def _lanes_left(self, sequence: DecodeSequence) -> int:
        """Drafts stay in the block that the last token is written to: they need no memory of their own."""
        return self._block_size - 1 - (sequence.num_tokens - 1) % self._block_size
