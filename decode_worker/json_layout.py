"""Layout of the JSON of an output, and the tokens that it spells texts with: guesses about what comes next.

A model that has written a comma, a line break and six spaces does so again after the next comma, and it cuts
a name into the same tokens as before, be they the usual ones or not. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

_WHITE = b" \t\r\n"
_SIGNS = b"{}[],:"
_ALPHANUMERIC = ord("0")
"""Sign that stands for all letters and digits before another one."""
_PREFIX = 3
"""Bytes by which an earlier place of a text is found."""
_PLACES = 8
"""Last places that are kept for each such prefix."""


@dataclass(frozen=True, slots=True)
class JsonPlace:
    """Place in a text of JSON, outside strings behind the sign that came last and white space."""

    in_string: bool = False
    escaped: bool = False
    depth: int = 0
    before: int = 0
    """Sign before the last one, letters and digits alike."""
    sign: int = 0
    """Sign that came last; 0: none."""
    white: bytes = b""
    """White space since."""
    indent: int = 0
    """Spaces at the beginning of the line of the last sign or string."""

    def after(self, text: bytes) -> JsonPlace:
        """Return the place behind a further text."""
        place = self
        for byte in text:
            place = place.behind(byte)
        return place

    def behind(self, byte: int) -> JsonPlace:
        """Return the place behind a further byte."""
        if self.in_string:
            if self.escaped:
                return replace(self, escaped=False)
            if byte == ord("\\"):
                return replace(self, escaped=True)
            return self._at(byte, in_string=False) if byte == ord('"') else self
        if byte in _WHITE:
            return replace(self, white=self.white + bytes((byte,)))
        if byte == ord('"'):
            return replace(self, in_string=True, indent=self.next_indent)
        step = (byte in b"{[") - (byte in b"}]")
        return self._at(byte if byte in _SIGNS else _ALPHANUMERIC, depth=self.depth + step)

    def kinds(self) -> Iterator[tuple[int, ...]]:
        """Yield what a layout is kept by, the most particular first."""
        yield self.depth, self.before, self.sign
        yield self.depth, self.sign
        yield (self.sign,)

    @property
    def next_indent(self) -> int:
        """Spaces at the beginning of the line of what comes next."""
        line = self.white.rfind(b"\n")
        return self.indent if line < 0 else len(self.white) - line - 1

    def _at(self, sign: int, **changes: Any) -> JsonPlace:
        changes = {"indent": self.indent if self.in_string else self.next_indent, **changes}
        return replace(self, before=self.sign, sign=sign, white=b"", **changes)


@dataclass(frozen=True, slots=True)
class Layout:
    """White space that followed a sign, and the next sign where it came right after."""

    white: bytes
    """Up to the last line break, if there is one."""
    step: int | None
    """Spaces after that break, less those of the line before; None: there is no break."""
    sign: bytes

    def at(self, place: JsonPlace) -> bytes:
        """Return the same behind the last sign of a place."""
        spaces = 0 if self.step is None else max(place.indent + self.step, 0)
        return self.white + b" " * spaces + self.sign


def layout_of(place: JsonPlace, sign: bytes) -> Layout:
    """Return what lies between the last sign of a place and a further one."""
    line = place.white.rfind(b"\n") + 1
    if not line:
        return Layout(place.white, None, sign)
    return Layout(place.white[:line], len(place.white) - line - place.indent, sign)


class Words(Protocol):
    """A vocabulary: `GrammarState` has it."""

    def tokenize(self, text: bytes) -> Sequence[int]:
        """Return the tokens of a text by itself."""
        ...

    def spelled(self, token_ids: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        ...


class SeenText:
    """Text of an output so far."""

    def __init__(self, begin: int = 0) -> None:
        """Begin behind the first `begin` tokens of the output, which are no JSON."""
        self.place = JsonPlace()
        self._begin = begin
        self._tokens: list[int] = []
        self._begins: list[int] = [0]
        self._text = bytearray()
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._places: dict[bytes, list[int]] = {}
        """Numbers of tokens that begin with each prefix."""

    def follow(self, output: Sequence[int], words: Words) -> None:
        """Take the tokens of `output` that are new."""
        for token in output[self._begin + len(self._tokens) :]:
            piece = words.spelled([token])
            self._tokens.append(token)
            self._text += piece
            self._begins.append(len(self._text))
            for byte in piece:
                self._learn(byte)
            self._index()

    def _learn(self, byte: int) -> None:
        """Keep what follows a sign: white space, and the next sign if it is one."""
        before, self.place = self.place, self.place.behind(byte)
        if before.in_string or byte in _WHITE or not before.sign:
            return
        sign = bytes([byte]) if byte in _SIGNS or byte == ord('"') else b""
        if before.white or sign:
            self._layouts |= dict.fromkeys(before.kinds(), layout_of(before, sign))

    def _index(self) -> None:
        """Keep the places of the tokens whose first bytes are all there by now."""
        for number in range(max(0, len(self._tokens) - _PREFIX), len(self._tokens)):
            begin = self._begins[number]
            prefix = bytes(self._text[begin : begin + _PREFIX])
            kept = self._places.setdefault(prefix, []) if len(prefix) == _PREFIX else [number]
            if number not in kept:
                kept.append(number)
                del kept[:-_PLACES]

    def layouts(self, place: JsonPlace) -> Iterator[bytes]:
        """Yield what may come at a place, by what came at places like it; the most alike first."""
        if place.in_string or not place.sign:
            return
        for key in place.kinds():
            layout = self._layouts[key].at(place) if key in self._layouts else b""
            if layout.startswith(place.white) and len(layout) > len(place.white):
                yield layout[len(place.white) :]

    def tokens_of(self, text: bytes, words: Words, most: int) -> list[int]:
        """Return tokens that spell `text`, as they did so far, else as `words` has them; `most` at most."""
        found: list[int] = []
        while text and len(found) < most:
            runs = [self._run(number, text) for number in reversed(self._places.get(text[:_PREFIX], ()))]
            run = max(runs, key=self._length, default=range(0))
            tokens = self._tokens[run.start : run.stop] or list(words.tokenize(text)[:1])
            if not tokens:
                break
            found += tokens
            text = text[self._length(run) or len(words.spelled(tokens)) :]
        return found[:most]

    def _length(self, run: range) -> int:
        return self._begins[run.stop] - self._begins[run.start]

    def _run(self, number: int, text: bytes) -> range:
        """Return the tokens from `number` on that spell the beginning of `text`."""
        at, end = 0, number
        while end < len(self._tokens):
            piece = self._text[self._begins[end] : self._begins[end + 1]]
            if not piece or not text.startswith(bytes(piece), at):
                break
            at, end = at + len(piece), end + 1
        return range(number, end)
