"""GBNF to what workers compile: a regular expression where there is no recursion, else a Lark grammar.

llguidance cuts text into lexemes, longest match first, before it parses; GBNF has no lexemes, and
``[a-z]* "end"`` must match ``end``. A regular expression is matched as a whole, and in a Lark grammar whose
every lexeme is one character there is nothing to cut, so that both mean exactly what the GBNF says. The price
of the second is a mask of a millisecond or two where JSON schemas take some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.request.gbnf.nodes import BadGbnf, Chars, Choice, Name, Node, Repeat, Sequence, names_in
from gateway.request.gbnf.parser import parse

ROOT: Final = "root"
MAX_REGEX_CHARS: Final = 64 * 1024
"""Rules are written out where they are used; past this size they stay rules."""
MAX_WRITTEN_CHARS: Final = 16 * MAX_REGEX_CHARS
"""Size of all rules together, each of which is written out once for itself."""
MAX_RULES: Final = 1024


def translate(text: str) -> Grammar:
    """Raises `BadGbnf`."""
    rules = parse(text)
    if ROOT not in rules:
        raise BadGbnf(f"there is no rule {ROOT}")
    if len(rules) > MAX_RULES:
        raise BadGbnf(f"there are more than {MAX_RULES} rules")
    uses = {name: names_in(node) for name, node in rules.items()}
    order = _leaves_first(uses)
    regex = None if order is None else _as_regex(rules, order)
    return Grammar(Kind.LARK, _as_lark(rules)) if regex is None else Grammar(Kind.REGEX, regex)


def _leaves_first(uses: Mapping[str, frozenset[str]]) -> list[str] | None:
    """Return the rules that the root needs, each after those that it uses; None if one needs itself."""
    order: list[str] = []
    done: set[str] = set()
    path: dict[str, list[str]] = {ROOT: sorted(uses[ROOT])}  # rules being looked at, and what is left of each
    while path:
        name, left = next(reversed(path.items()))
        if not left:
            path.pop(name)
            done.add(name)
            order.append(name)
        elif (used := left.pop()) in path:
            return None
        elif used not in done:
            path[used] = sorted(uses[used])
    return order


class _TooLong(Exception):
    """A rule written out would be longer than allowed. The rest of it was not written."""


def _as_regex(rules: Mapping[str, Node], order: list[str]) -> str | None:
    """Return one regular expression, or None if it would be too long."""
    written: dict[str, str] = {}
    left = MAX_WRITTEN_CHARS
    for name in order:
        try:
            written[name] = _regex(rules[name], written)
        except _TooLong:
            return None
        left -= len(written[name])
        if left < 0 or len(written[name]) > MAX_REGEX_CHARS:
            return None
    return written[ROOT]


def _regex(node: Node, written: Mapping[str, str]) -> str:
    """Raises `_TooLong`."""
    match node:
        case Chars(ranges):
            return _class(ranges)
        case Name(rule):
            return f"(?:{written[rule]})"
        case Sequence(items):
            return _joined("", (_group(item, written) for item in items))
        case Choice(options):
            return _joined("|", (_regex(option, written) for option in options))
        case Repeat(item, least, most):
            return f"(?:{_regex(item, written)}){_bounds(least, most)}"


def _group(node: Node, written: Mapping[str, str]) -> str:
    text = _regex(node, written)
    return f"(?:{text})" if isinstance(node, Choice) else text


def _joined(between: str, pieces: Iterable[str]) -> str:
    """Counted as the pieces come: a rule may be used ten thousand times."""
    taken: list[str] = []
    left = MAX_REGEX_CHARS
    for piece in pieces:
        taken.append(piece)
        left -= len(piece) + len(between)
        if left < 0:
            raise _TooLong
    return between.join(taken)


def _as_lark(rules: Mapping[str, Node]) -> str:
    numbers = {name: f"r{number}" for number, name in enumerate(rules)}
    lines = [f"start: {numbers[ROOT]}"]
    lines += [f"{numbers[name]}: {_lark(node, numbers)}" for name, node in rules.items()]
    return "\n".join(lines)


def _lark(node: Node, numbers: Mapping[str, str]) -> str:
    match node:
        case Chars(ranges):
            return f"/{_class(ranges)}/"
        case Name(rule):
            return numbers[rule]
        case Sequence(items):
            return " ".join(_lark(item, numbers) for item in items) or '""'
        case Choice(options):
            return f"({' | '.join(_lark(option, numbers) for option in options)})"
        case Repeat(item, least, most):
            return f"({_lark(item, numbers)}){_bounds(least, most)}"


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    """Write a class in escapes alone, which mean the same to every parser on the way."""
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"


def _bounds(least: int, most: int | None) -> str:
    return f"{{{least},}}" if most is None else f"{{{least},{most}}}"
