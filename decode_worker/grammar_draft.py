"""A drafter without a model for outputs with a grammar: what the grammar leaves no choice about.

Names of properties, fixed words and brackets are long runs of such text. Where a grammar lets white space
come between two of them, a guess goes on: JSON as this output has laid it out so far, at first as most models
write it. The guess is only a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from decode_worker.json_layout import JsonPlace, SeenText
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

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[DecodeSequence, SeenText] = WeakKeyDictionary()

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`."""
        return sequence.grammar is None

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        return [
            () if one.grammar is None else self._draft(one, one.grammar, count)
            for one, count in zip(sequences, counts, strict=True)
        ]

    def _draft(self, sequence: DecodeSequence, grammar: GrammarState, count: int) -> Sequence[int]:
        if grammar.dormant:
            self._seen[sequence] = SeenText(len(sequence.output_ids))
            return ()
        seen = self._seen.setdefault(sequence, SeenText())
        seen.follow(sequence.output_ids, grammar)
        return likely_tokens(grammar, sequence.output_ids[-1:], count, seen)


def likely_tokens(
    grammar: GrammarState, last: Sequence[int], count: int, seen: SeenText | None = None
) -> list[int]:
    """Return at most `count` tokens that the grammar leaves no choice about, with usual JSON in between.

    `last` is the token before, the last one that `seen` has.
    """
    if grammar.dormant or grammar.stuck:
        return []
    seen = seen or SeenText()
    at, text, before, place = grammar.copy(), b"", grammar.spelled(last), seen.place
    for _ in range(count):  # each turn is a token at least
        more = at.forced() or _usual(at, before + text, seen, place)
        if not more:
            break
        text, place = text + more, place.after(more)
        at.follow(at.tokenize(more))
        if at.stuck or at.complete:
            break
    return seen.tokens_of(text, grammar, count) if text else []


def _usual(grammar: GrammarState, before: bytes, seen: SeenText, place: JsonPlace) -> bytes:
    if grammar.allows(grammar.tokenize(_WITHIN_TEXT)):
        return b""
    return next(
        (more for more in _guesses(before, seen, place) if grammar.allows(grammar.tokenize(more))), b""
    )


def _guesses(before: bytes, seen: SeenText, place: JsonPlace) -> Iterator[bytes]:
    """Yield what may come, the likeliest first: as it came before in this output, then as is usual."""
    yield from seen.layouts(place)
    yield from _USUAL.get(before[-1:], ())
