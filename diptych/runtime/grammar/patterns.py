r"""Regular expressions as clients mean them, in the syntax of Rust's regex crate.

`\d`, `\w` and `\s` are ASCII, and `\p{…}` is Unicode. Constrained outputs are read by programs, and a
model that may choose among all decimal digits of Unicode writes phone numbers that none can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0b\x0c\r\x20"}
_FLAG_I: Final = re.compile(r"\(\?[a-zA-Z]*i")
_POSIX: Final = r"\[:\^?[a-z]+:\]"
_TOKEN: Final = re.compile(rf"\\.|{_POSIX}|\[\^?\]?|.", re.DOTALL)
_TOKEN_PLAIN: Final = re.compile(r"\\.|.", re.DOTALL)
MAX_LOOK_AHEADS: Final = 16
_TOKEN_ECMA: Final = re.compile(r"\\.|\[\^?|.", re.DOTALL)


def ascii_classes(pattern: str, *, ecma: bool = False) -> str:
    """Return ``pattern`` with its Perl classes as lists of ASCII characters.

    Args:
        pattern: regular expression; may be invalid, and then is so afterwards.
        ecma: it is JavaScript's, as in JSON schemas: what Rust gives a meaning of its own there is escaped.
    """
    folds = _FLAG_I.search(pattern) is not None  # "k" and "s" to letters beyond ASCII
    token = _TOKEN_ECMA if ecma else _TOKEN
    made: list[str] = []
    depth = 0  # of brackets
    for text in token.findall(pattern):
        if text[0] == "\\" and len(text) == 2:
            made.append(_escape(text[1], depth > 0, folds=folds, ecma=ecma))
            continue
        if depth and ecma and text[0] in "[&~":
            text = f"\\{text}"
        elif text[0] == "[" and not (text.endswith(":]") and len(text) > 3):
            depth += 1
        elif text == "]" and depth:
            depth -= 1
        made.append(text)
    return "".join(made)


def _escape(char: str, in_class: bool, *, folds: bool, ecma: bool) -> str:
    """Return what a backslash and ``char`` come to."""
    listed = _CLASSES.get(char.lower())
    if listed is not None:
        if char.isupper():
            return f"[^{listed}]"
        if in_class:
            return f"[{listed}]"
        return f"(?-i:[{listed}])" if folds else f"[{listed}]"
    if ecma and char in "<>":
        return char
    if in_class and char == "b":
        return r"\x08"
    return f"\\{char}"


def literal_pattern(text: str) -> str:
    """Return a pattern that matches ``text`` itself: in escapes, but for ASCII letters and digits."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def has_word_boundary(pattern: str) -> bool:
    r"""Return whether `\b` or `\B` stands in ``pattern`` outside of brackets."""
    return any(char in ("\\b", "\\B") for _, char in _plain(pattern))


def split_look_ahead(pattern: str) -> list[str] | None:
    """Return patterns that all together are ``pattern``, whose look-ahead is all at its beginning.

    None if there is other look-around. ``^(?=.*[0-9])(?=.*[A-Z]).{8,}$`` is three patterns.
    """
    parts: list[str] = []
    rest = pattern.removeprefix("^")
    while rest != pattern and rest.startswith("(?=") and len(parts) < MAX_LOOK_AHEADS:
        end = _closing(rest)
        if end is None:
            return None
        parts.append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1 :]
    return [*parts, f"^(?:{rest})"] if parts and "|" not in _outside(rest) else None


def _closing(text: str) -> int | None:
    """Return the place of the parenthesis that closes the one at the beginning."""
    depth = 0
    for at, char in _plain(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if not depth:
            return at
    return None


def _outside(text: str) -> str:
    """Return the characters outside of parentheses."""
    depth, found = 0, []
    for _, char in _plain(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if not depth:
            found.append(char)
    return "".join(found)


def _plain(text: str) -> Iterator[tuple[int, str]]:
    """Yield what is not in brackets, with its place: characters, and escapes with their backslash."""
    at, in_class = 0, False
    for token in _TOKEN_PLAIN.findall(text):
        if in_class:
            in_class = token != "]"
        elif token == "[":
            in_class = True
        else:
            yield at, token
        at += len(token)
