"""Prompt lookup: a drafter without a model."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from decode_worker.sequence import DecodeSequence

LENGTHS = (3, 2)
"""Lengths of the ends of a text that prompt lookup searches, the longest first."""
PROMPT_TOKENS = 4096
"""Last tokens of a prompt that are indexed: that takes two milliseconds, once."""
LONGEST_REST = 64
"""Most tokens for which a sequence gets no draft after wrong ones."""
LONGEST_PAUSE = 16
"""Most tokens for which a sequence gets no draft after searches that found nothing."""


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

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.draft`."""
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        text = self._texts.get(sequence)
        return text is not None and len(sequence.output_ids) < text.rests_until

    def _draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(sequence.next_row.prompt_ids, self._most)
        text.judge(sequence.output_ids)
        text.append_output(sequence.output_ids)
        return text.draft(count)


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
