"""Whether a text may be the beginning of a JSON object, by a parser written out: the oracle of grammars.

White space is what the server allows between tokens: a space, or a new line and up to 24 blanks. In strings
llguidance writes characters as themselves but for quotes, backslashes and control characters.
"""

from __future__ import annotations

import re

_SPACE = re.compile(r" |\n[ \t]{0,24}|")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?")
_CHAR = re.compile(r'[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(?:[01][0-9a-fA-F]|7[fF])')
_CHAR_BEGUN = re.compile(r"\\(?:u(?:0(?:0[017]?)?)?)?")
_WORDS = ("true", "false", "null")


class _Ends(Exception):
    """The text ends inside what is being read: it may still become it."""


class _Wrong(Exception):
    """The text is no beginning of it."""


def may_become_object(text: str) -> bool:
    try:
        end = _object(text, 0)
    except _Ends:
        return True
    except _Wrong:
        return False
    return end == len(text)


def is_object(text: str) -> bool:
    try:
        return _object(text, 0) == len(text)
    except (_Ends, _Wrong):
        return False


def _object(text: str, at: int) -> int:
    at = _sign(text, at, "{")
    at = _space(text, at)
    if text[at] == "}":
        return at + 1
    while True:
        at = _string(text, at)
        at = _sign(text, _space(text, at), ":")
        at = _value(text, _space(text, at))
        at = _space(text, at)
        if text[at] == "}":
            return at + 1
        at = _space(text, _sign(text, at, ","))


def _array(text: str, at: int) -> int:
    at = _space(text, at + 1)
    if text[at] == "]":
        return at + 1
    while True:
        at = _space(text, _value(text, at))
        if text[at] == "]":
            return at + 1
        at = _space(text, _sign(text, at, ","))


def _value(text: str, at: int) -> int:
    first = text[at]
    if first == "{":
        return _object(text, at)
    if first == "[":
        return _array(text, at)
    if first == '"':
        return _string(text, at)
    for word in _WORDS:
        if text.startswith(word, at):
            return at + len(word)
        if word.startswith(text[at:]):
            raise _Ends
    return _number(text, at)


def _number(text: str, at: int) -> int:
    begun = _NUMBER_BEGUN.match(text, at)
    if begun is not None and begun.end() == len(text) and begun.group():
        raise _Ends
    found = _NUMBER.match(text, at)
    if found is None:
        raise _Wrong
    return found.end()


def _string(text: str, at: int) -> int:
    at = _sign(text, at, '"')
    while True:
        if at == len(text):
            raise _Ends
        if text[at] == '"':
            return at + 1
        found = _CHAR.match(text, at)
        if found is None:
            begun = _CHAR_BEGUN.fullmatch(text, at)
            raise _Ends if begun is not None else _Wrong
        at = found.end()


def _sign(text: str, at: int, sign: str) -> int:
    if at == len(text):
        raise _Ends
    if text[at] != sign:
        raise _Wrong
    return at + 1


def _space(text: str, at: int) -> int:
    """Past the white space; raises `_Ends` if nothing follows it yet."""
    found = _SPACE.match(text, at)
    at = at if found is None else found.end()
    if at == len(text):
        raise _Ends
    return at
