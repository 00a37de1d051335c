"""Speculative decoding: a step computes drafted tokens too, and shows which of them were right.

After a sequence's last token the step computes those that a drafter expects to follow (Leviathan et al.,
2023, arXiv:2211.17192). Each position is sampled from the model's own logits with the random numbers that
belong to it, as it would be in a step of its own; drafted tokens stand up to the first that differs from the
sampled one. So drafts change no output, with any sampling, where a row's numbers do not depend on the other
rows of the step. They pay where a step waits for memory and not for arithmetic: with few sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from decode_worker.sequence import DecodeSequence
from decode_worker.step_group import Row

_log = logging.getLogger(__name__)

LENGTHS = (3, 2)
"""Lengths of the ends of a text that prompt lookup searches, the longest first."""
PROMPT_TOKENS = 4096
"""Last tokens of a prompt that are indexed: that takes two milliseconds, once."""
LONGEST_REST = 64
"""Most tokens for which a sequence gets no draft after wrong ones."""
LONGEST_PAUSE = 16
"""Most tokens for which a sequence gets no draft after searches that found nothing."""


class Drafter(Protocol):
    """A source of drafted tokens."""

    def draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        """Return at most `count` tokens that may follow `sequence`."""
        ...

    def rests(self, sequence: DecodeSequence) -> bool:
        """Return whether it has no draft for the next tokens, so that steps may be launched ahead."""
        ...


class Speculation:
    """The budget of drafted tokens of a step."""

    def __init__(self, drafter: Drafter, *, most: int, tokens: int, block_size: int) -> None:
        """Allow `most` drafted tokens a sequence; `tokens` a step, those that are no drafts included."""
        self._drafter = drafter
        self._most = most
        self._tokens = tokens
        self._block_size = block_size

    def draft(self, rows: Sequence[Row]) -> None:
        """Give each sequence its draft for the next step; all of their tokens must be known."""
        room = self._room(len(rows))
        for group, sequence in rows:
            count = min(room, group.max_draft(sequence), self._room_in_block(sequence))
            sequence.draft = self._draft(sequence, count) if count > 0 else []

    def needs_tokens(self, rows: Sequence[Row]) -> bool:
        """Return whether the step after one of `rows` has to know their tokens: they have drafts, or will."""
        if any(sequence.draft for _, sequence in rows):
            return True
        return self._room(len(rows)) > 0 and any(
            group.max_draft(sequence) > 0 and not self._drafter.rests(sequence) for group, sequence in rows
        )

    def _draft(self, sequence: DecodeSequence, count: int) -> list[int]:
        """Return a draft; none where the drafter fails."""
        try:
            return list(self._drafter.draft(sequence, count))[:count]
        except Exception:
            _log.exception("a sequence of %d tokens got no draft", sequence.num_tokens)
            return []

    def _room(self, sequences: int) -> int:
        """Return how many tokens each of `sequences` may have drafted."""
        return min(self._most, max(self._tokens // sequences - 1, 0))

    def _room_in_block(self, sequence: DecodeSequence) -> int:
        """Return the room in the block of the last token: drafts stay in it and need no other block."""
        return self._block_size - 1 - (sequence.num_tokens - 1) % self._block_size


class PromptLookup:
    """A drafter without a model: the tokens that followed the last ones earlier in prompt or output.

    Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): answers that quote,
    edit or repeat have much text that is there already. A draft costs a look into a table. A sequence whose
    drafts are wrong gets shorter ones; then, and where no earlier occurrence is found, none for a while.
    """

    def __init__(self, most: int) -> None:
        """Draft at most `most` tokens."""
        self._most = most
        self._texts: WeakKeyDictionary[DecodeSequence, _Text] = WeakKeyDictionary()

    def draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(sequence.next_row.prompt_ids, self._most)
        text.judge(sequence.output_ids)
        text.append_output(sequence.output_ids)
        return text.draft(count)

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        text = self._texts.get(sequence)
        return text is not None and len(sequence.output_ids) < text.rests_until


class _Text:
    """The tokens of a sequence, an index of their ends, and the success of its drafts."""

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # ends, and the index of the next token
        self._output = 0  # tokens of the output among them
        self._most, self._length = most, most  # of the next draft
        self._wrong = self._barren = 0  # drafts in a row without a right token; searches that found nothing
        self._drafted: list[int] = []
        self.rests_until = 0  # tokens of the output
        for token in prompt_ids[-PROMPT_TOKENS:]:
            self._append(token)

    def judge(self, output_ids: Sequence[int]) -> None:
        """Compare the last draft with the output, and adapt the length of the next one."""
        drafted, self._drafted = self._drafted, []
        if not drafted:
            return
        right = 0
        for token, came in zip(drafted, output_ids[self._output :], strict=False):
            if token != came:
                break
            right += 1
        self._length = min(2 * self._length, self._most) if right == len(drafted) else max(right, 1)
        self._wrong = 0 if right else self._wrong + 1
        if self._wrong:
            self.rests_until = len(output_ids) + min(2**self._wrong, LONGEST_REST)

    def append_output(self, output_ids: Sequence[int]) -> None:
        """Append the new tokens of the output."""
        for token in output_ids[self._output :]:
            self._append(token)
        self._output = len(output_ids)

    def draft(self, count: int) -> Sequence[int]:
        """Return a draft and remember it; a text that repeats itself is continued periodically."""
        if self._output < self.rests_until:
            return ()
        at = self._find()
        if at is None:
            self._barren += 1
            self.rests_until = self._output + min(self._barren // 2, LONGEST_PAUSE)
            return ()
        self._barren = 0
        period, length = len(self._tokens) - at, min(count, self._length)
        draft = self._tokens[at : at + length]
        while len(draft) < length:
            draft.append(draft[len(draft) - period])
        self._drafted = draft
        return draft

    def _find(self) -> int | None:
        """Return the index after the latest earlier occurrence of the longest end that has one."""
        for length in LENGTHS:
            at = self._followed.get(tuple(self._tokens[-length:]))
            if at is not None:
                return at
        return None

    def _append(self, token: int) -> None:
        for length in LENGTHS:
            if length <= len(self._tokens):
                self._followed[tuple(self._tokens[-length:])] = len(self._tokens)
        self._tokens.append(token)
