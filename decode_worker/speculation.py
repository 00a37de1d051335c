"""Speculative decoding: a step computes drafted tokens too, and shows which of them were right.

After a sequence's last token the step computes those that a drafter expects to follow (Leviathan et al.,
2023, arXiv:2211.17192). Each position is sampled from the model's own logits with the random numbers that
belong to it, as it would be in a step of its own; drafted tokens stand up to the first that differs from the
sampled one. So drafts change no output, with any sampling, where a row's numbers do not depend on the other
rows of the step. They pay where a step waits for memory and not for arithmetic: with few sequences.

The life of a draft:

1. `reserve`, on the event loop: every sequence of the step has the block of its next token by now. Those
   that may be drafted for get lanes behind it, in blocks that are free beyond what all others may need.
2. `draft`, on the engine's thread: drafters fill the lanes of all sequences at once (`Drafter`), and the
   rules of each request are walked down its draft (draft_walk.py).
3. The step computes and samples them; the sequence takes the right ones and gives the other lanes back
   (choices.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from decode_worker.draft_lengths import StepCosts
from decode_worker.draft_tree import Draft
from decode_worker.draft_walk import set_draft
from decode_worker.sequence import DecodeSequence
from decode_worker.step_group import Row

_log = logging.getLogger(__name__)


class Drafter(Protocol):
    """A source of drafted tokens."""

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Draft]:
        """Return, for each of `sequences`, tokens that may follow it, at most as many as its count says.

        Called on the engine's thread, between two steps.
        """
        ...

    def rests(self, sequence: DecodeSequence) -> bool:
        """Return whether it has no draft for the next tokens, so that steps may be launched ahead."""
        ...


class Speculation:
    """The budget of drafted tokens of a step."""

    def __init__(self, drafter: Drafter, *, most: int, tokens: int, costs: StepCosts | None = None) -> None:
        """Allow `most` drafted tokens a sequence; `tokens` a step, those that are no drafts included.

        `costs` get the times of steps.
        """
        self._drafter = drafter
        self._costs = costs
        self._most = most
        self._tokens = tokens

    def reserve(self, rows: Sequence[Row]) -> bool:
        """Give sequences lanes for drafts after their next token; return whether one got some.

        All of their tokens must be known.
        """
        room = self._room(len(rows), sum(sequence.behind for _, sequence in rows))
        for group, sequence in rows:
            count = min(room, group.max_draft(sequence))
            if count > 0 and not self._drafter.rests(sequence):
                sequence.lanes = group.request.blocks.reserve_lanes(sequence, count, spare=len(rows))
        return any(sequence.lanes for _, sequence in rows)

    def draft(self, rows: Sequence[Row]) -> None:
        """Fill the lanes of sequences with drafts. Called on the engine's thread."""
        sequences = [sequence for _, sequence in rows if sequence.lanes]
        for sequence, tokens in zip(sequences, self._drafts(sequences), strict=True):
            set_draft(sequence, tokens)

    def record_step(self, sequences: int, rows: int, seconds: float) -> None:
        """Record the time of a step that computed `rows` tokens, without the making of its drafts."""
        if self._costs is not None:
            self._costs.record_step(rows, seconds, plain=rows == sequences)

    def needs_tokens(self, rows: Sequence[Row]) -> bool:
        """Return whether the step after one of `rows` has to know their tokens, since it will have drafts; so
        it does, too, where this step computes tokens once more.
        """
        if any(sequence.behind for _, sequence in rows):
            return True
        return self._room(len(rows)) > 0 and any(
            group.max_draft(sequence) > 0 and not self._drafter.rests(sequence) for group, sequence in rows
        )

    def _drafts(self, sequences: Sequence[DecodeSequence]) -> Sequence[Draft]:
        """Return the drafts of all; none where the drafter fails."""
        try:
            drafts = self._drafter.draft(sequences, [sequence.lanes for sequence in sequences])
            if len(drafts) != len(sequences):
                raise ValueError(f"{len(drafts)} drafts for {len(sequences)} sequences")
        except Exception:
            _log.exception("%d sequences got no draft", len(sequences))
            return [()] * len(sequences)
        return drafts

    def _room(self, sequences: int, behind: int = 0) -> int:
        """Return how many tokens each of `sequences` may have drafted, where a step computes `behind` tokens
        once more.
        """
        return min(self._most, max((self._tokens - behind) // sequences - 1, 0))
