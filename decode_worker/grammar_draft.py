"""A drafter without a model for outputs with a grammar: what the grammar leaves no choice about.

Names of properties, fixed words and brackets are long runs of such text. Where a grammar lets white space
come between two of them, a guess goes on: JSON as most models write it. The guess is only a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.sequence import DecodeSequence
from diptych.worker_process.grammar_masks import GrammarState

_USUAL = {
    b'"': (b": ", b", ", b"}"),
    b":": (b' "', b" "),
    b",": (b' "', b" "),
    b"{": (b'"',),
    b"[": (b'"',),
    b"}": (b", ",),
    b"]": (b", ",),
}
"""Usual continuations of a sign of JSON, by that sign; the first that the grammar lets come is taken."""
_WITHIN_TEXT = b"a"
"""Comes only where free text may come, in which no guess is made."""


class GrammarDraft:
    """A `Drafter`."""

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        return sequence.grammar is None

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        return [
            () if one.grammar is None else likely_tokens(one.grammar, one.output_ids[-1:], count)
            for one, count in zip(sequences, counts, strict=True)
        ]


def likely_tokens(grammar: GrammarState, last: Sequence[int], count: int) -> list[int]:
    """Return at most `count` tokens that the grammar leaves no choice about, with usual JSON in between.

    `last` is the token before.
    """
    if grammar.dormant or grammar.stuck:
        return []
    at, text, before = grammar.copy(), b"", grammar.spelled(last)
    for _ in range(count):  # each turn is a token at least
        more = at.forced() or _usual(at, before + text)
        if not more:
            break
        text += more
        at.follow(at.tokenize(more))
        if at.stuck or at.complete:
            break
    return grammar.tokenize(text)[:count] if text else []


def _usual(grammar: GrammarState, before: bytes) -> bytes:
    if before[-1:] not in _USUAL or grammar.allows(grammar.tokenize(_WITHIN_TEXT)):
        return b""
    usual = (more for more in _USUAL[before[-1:]] if grammar.allows(grammar.tokenize(more)))
    return next(usual, b"")
