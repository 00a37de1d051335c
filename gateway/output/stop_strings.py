"""Stop strings in a text that comes in pieces.

The match is the one that is complete first; of several complete at the same character, the longest. It
depends on the text alone, not on the cuts between pieces. Text that may be the beginning of a match is held
back, unless the match is to be shown.

Each stop string is a Knuth–Morris–Pratt automaton: its state is how many of its characters the end of the
text already matches, so a character costs O(1) amortised per stop string, however long or self-similar. Its
table is built once for all outputs of a request, and for all prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_TABLES: Final = 64  # kept tables: of four requests with the maximum number of stop strings


class StopResult(NamedTuple):
    """Text to show now, and the stop string that ended the output, if one did."""

    text_to_emit: str
    matched: str | None


class StopStrings:
    """Search for stop strings in one output. After a match each further `push` returns that match only."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, early: bool = False) -> StopResult:
        """Add the next piece of text; ``text_to_emit`` of the result may be empty.

        ``early``: a stop string that ends within this piece is no match; one that begins in it may be.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._held and self._first_chars.isdisjoint(text) and not self._under_way():
            return StopResult(text, None)
        seen = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            complete = [automaton.stop for automaton in self._automata if automaton.advance(char)]
            if complete and not early:
                self._matched = max(complete, key=len)
                self._held = ""
                return StopResult(self._shown(seen, index), self._matched)
        held = 0 if self._include else max((automaton.state for automaton in self._automata), default=0)
        cut = len(seen) - held
        self._held = seen[cut:]
        return StopResult(seen[:cut], None)

    def flush(self) -> str:
        """Return the text held back, at the end of an output without a match."""
        held, self._held = self._held, ""
        return held

    def _shown(self, seen: str, end: int) -> str:
        return seen[:end] if self._include or self._matched is None else seen[: end - len(self._matched)]

    def _under_way(self) -> bool:
        return any(automaton.state for automaton in self._automata)


class _Automaton:
    """Automaton of one stop string; ``state``: length of its longest prefix that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def advance(self, char: str) -> bool:
        """Return whether ``char`` completes the stop string."""
        state = self.state
        while state and self.stop[state] != char:
            state = self._fallback[state]
        if self.stop[state] == char:
            state += 1
        if state == len(self.stop):
            self.state = self._fallback[state]
            return True
        self.state = state
        return False


@lru_cache(_TABLES)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return for each matched length the next shorter to try: the longest proper border of that prefix."""
    borders = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length]
        if stop[index] == stop[length]:
            length += 1
        borders[index + 1] = length
    return tuple(borders)
