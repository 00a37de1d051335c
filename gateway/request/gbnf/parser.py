"""Reads GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.

A rule goes on until the next ``name ::=``, so that alternatives may stand on lines of their own, which
llama.cpp itself allows only inside parentheses; every grammar that it reads means the same here.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.request.gbnf.nodes import (
    HIGHEST_CHAR,
    SURROGATES,
    BadGbnf,
    Chars,
    Choice,
    Name,
    Node,
    Repeat,
    Sequence,
    complement,
)

MAX_DEPTH: Final = 64
"""Parentheses inside parentheses."""
MAX_REPEATS: Final = 1024
"""The bounds in ``{m,n}``."""

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_DEFINES: Final = re.compile(r"::=")
_BOUNDS: Final = re.compile(r"\{\s*(\d{1,6})\s*(?:(,)\s*(\d{1,6})?\s*)?\}")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN: Final = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in '\\"[]^-'}}
_SIGNS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(text: str) -> dict[str, Node]:
    """Return the rules by name. Raises BadGbnf with the place of the fault."""
    return _Parser(text).rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._uses: dict[str, int] = {}
        """Place in the text of the first use of each name."""

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip_blank()
        while self._at < len(self._text):
            name = self._take(_NAME, "a rule's name")
            self._take(_DEFINES, "::=")
            if name in found:
                raise self._error("this rule was defined before")
            found[name] = self._choice(depth=0)
        if lost := [at for name, at in self._uses.items() if name not in found]:
            self._at = min(lost)
            raise self._error("a rule is used that is not defined")
        return found

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error("parentheses are nested too deep")
        options = [self._sequence(depth)]
        while self._accept("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, depth: int) -> Node | None:
        """Read the next item of a sequence; None at its end."""
        if self._accept("("):
            inner = self._choice(depth + 1)
            if not self._accept(")"):
                raise self._error("a parenthesis is missing")
            return inner
        if self._peek() == '"':
            return self._literal()
        if self._peek() == "[":
            return self._class()
        if self._accept("."):
            return Chars(((0, HIGHEST_CHAR),))
        name = _NAME.match(self._text, self._at)
        if name is None or self._begins_rule(name.end()):
            return None
        self._uses.setdefault(name.group(), name.start())
        self._move(name.end())
        return Name(name.group())

    def _repeated(self, item: Node) -> Node:
        if (sign := self._peek()) in _SIGNS:
            self._move(self._at + 1)
            return Repeat(item, *_SIGNS[sign])
        return Repeat(item, *self._bounds()) if sign == "{" else item

    def _bounds(self) -> tuple[int, int | None]:
        found = _BOUNDS.match(self._text, self._at)
        if found is None:
            raise self._error("bounds are {m}, {m,} or {m,n}")
        least = int(found[1])
        most = least if found[2] is None else None if found[3] is None else int(found[3])
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"bounds must be in order and at most {MAX_REPEATS}")
        self._move(found.end())
        return least, most

    def _literal(self) -> Node:
        self._at += 1
        chars: list[Node] = []
        while self._peek() != '"':
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._move(self._at + 1)
        return chars[0] if len(chars) == 1 else Sequence(tuple(chars))

    def _class(self) -> Chars:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._char()
            if high < low:
                raise self._error("a range of characters is upside down")
            ranges.append((low, high))
        self._move(self._at + 1)
        found = complement(ranges) if negated else tuple(ranges)
        if not found:
            raise self._error("a class has no characters")
        return Chars(found)

    def _char(self) -> int:
        """Read a character of a literal or class as its code point."""
        char = self._peek()
        if char != "\\":
            if not char:
                raise self._error("a literal or class has no end")
            self._at += 1
            return ord(char)
        found = _ESCAPE.match(self._text, self._at)
        if found is None or (found[4] is not None and found[4] not in _PLAIN):
            raise self._error("this escape is not known")
        code = ord(_PLAIN[found[4]]) if found[4] is not None else int(found[1] or found[2] or found[3], 16)
        if code > HIGHEST_CHAR or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._error("this escape is no character")
        self._at = found.end()
        return code

    # ---- the text ------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _accept(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._move(self._at + 1)
        return True

    def _take(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"{what} is expected")
        self._move(found.end())
        return found.group()

    def _begins_rule(self, at: int) -> bool:
        return _DEFINES.match(self._text, self._blank_after(at)) is not None

    def _move(self, at: int) -> None:
        self._at = self._blank_after(at)

    def _skip_blank(self) -> None:
        self._at = self._blank_after(self._at)

    def _blank_after(self, at: int) -> int:
        found = _BLANK.match(self._text, at)
        return at if found is None else found.end()

    def _error(self, what: str) -> BadGbnf:
        return BadGbnf(f"line {self._text.count(chr(10), 0, self._at) + 1}: {what}")
