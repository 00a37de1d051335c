"""A drafter without a model: what followed the last tokens where they stood before, in prompt or output.

Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): answers that quote, edit
or repeat say much that is there already. It costs a look into a table. A sequence whose drafts are wrong gets
shorter ones; then, and where nothing is found, none for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from decode_worker.sequence import DecodeSequence

LENGTHS = (3, 2)
"""Of the ends of a text that are looked up, the longest first."""
PROMPT_TOKENS = 4096
"""The last ones of a prompt are looked at: to enter so many takes two milliseconds, once."""
LONGEST_REST = 64
"""Tokens for which a sequence gets no draft after many wrong ones."""
LONGEST_PAUSE = 16
"""The same after many looks that found nothing."""


class PromptLookup:
    """The drafter of all sequences of a worker."""

    def __init__(self, most: int) -> None:
        """At most `most` tokens a draft."""
        self._most = most
        self._texts: WeakKeyDictionary[DecodeSequence, _Text] = WeakKeyDictionary()

    def draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(sequence.next_row.prompt_ids, self._most)
        text.judge(sequence.output_ids)
        text.catch_up(sequence.output_ids)
        return text.draft(count)

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        text = self._texts.get(sequence)
        return text is not None and len(sequence.output_ids) < text.rests_until


class _Text:
    """One sequence's tokens, where each end of them was followed by something, and how its drafts did."""

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # the ends, and where the next token stands
        self._output = 0  # tokens of the output among them
        self._most, self._length = most, most  # of the next draft
        self._wrong = self._barren = 0  # drafts in a row of which nothing was right; looks that found nothing
        self._drafted: list[int] = []
        self.rests_until = 0  # tokens of the output
        for token in prompt_ids[-PROMPT_TOKENS:]:
            self._append(token)

    def judge(self, output_ids: Sequence[int]) -> None:
        """See what came of the last draft; the next one goes by that."""
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

    def catch_up(self, output_ids: Sequence[int]) -> None:
        """Take in what is new of the output."""
        for token in output_ids[self._output :]:
            self._append(token)
        self._output = len(output_ids)

    def draft(self, count: int) -> Sequence[int]:
        """What is to come, and is remembered; a text that repeats itself goes on repeating."""
        if self._output < self.rests_until:
            return ()
        at = self._where()
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

    def _where(self) -> int | None:
        """The place after the latest earlier occurrence of the longest end that has one."""
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
