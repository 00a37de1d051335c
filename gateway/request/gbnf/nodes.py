"""A GBNF grammar as a tree."""

from __future__ import annotations

from dataclasses import dataclass

HIGHEST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters


class BadGbnf(ValueError):
    """The text is no GBNF grammar. The message repeats nothing of it."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Character out of inclusive ranges of code points; never empty."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Name:
    """Reference to the rule of this name."""

    rule: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Sequence of nodes; the empty text if there are none."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives, at least one."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; None = any number."""

    item: Node
    least: int
    most: int | None


Node = Chars | Name | Sequence | Choice | Repeat


def complement(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return all characters outside `ranges`."""
    outside: list[tuple[int, int]] = []
    begin = 0
    for low, high in sorted([*ranges, SURROGATES]):
        if begin < low:
            outside.append((begin, low - 1))
        begin = max(begin, high + 1)
    if begin <= HIGHEST_CHAR:
        outside.append((begin, HIGHEST_CHAR))
    return tuple(outside)


def names_in(node: Node) -> frozenset[str]:
    """Return the rules that `node` refers to itself."""
    found: set[str] = set()
    left = [node]
    while left:
        match left.pop():
            case Name(rule):
                found.add(rule)
            case Sequence(parts) | Choice(parts):
                left.extend(parts)
            case Repeat(item):
                left.append(item)
            case Chars():
                pass
    return frozenset(found)
