"""Calls as Mistral's models write them: ``[TOOL_CALLS][{"name": …, "arguments": …}, …]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.tools.json_objects import JsonObjects
from gateway.tools.lark import call_rules
from gateway.tools.parser import Marker, Parsed, call_from_json
from gateway.tools.tool import Tool
from runtime.grammar.grammar import Grammar, Kind

MARK: Final = "[TOOL_CALLS]"
MARKERS: Final = (MARK,)


class MistralParser:
    """After the mark there are calls only.

    Args:
        begun: the mark was put into the prompt.
    """

    def __init__(self, *, begun: bool = False) -> None:
        self._marker = Marker(MARK)
        self._objects = JsonObjects()
        self._after: str | None = "" if begun else None  # since the mark, or since the last call
        self._begun = begun
        self._called = False

    def push(self, text: str) -> Parsed:
        result = Parsed()
        if self._after is None:
            shown, after = self._marker.push(text)
            result += Parsed(shown)
            if after is None:
                return result
            self._after, text = "", after
        self._after += text
        for found in self._objects.push(text):
            call = call_from_json(found)
            if call is not None:
                result += Parsed(calls=(call,))
                self._called, self._after = True, ""
        return result

    def finish(self) -> Parsed:
        if self._after is None:
            return Parsed(self._marker.flush())
        if self._called and not self._objects.inside:
            return Parsed()  # what follows a call is brackets and separators
        mark = "" if self._begun or self._called else self._marker.found
        return Parsed(mark + self._after)


def grammar(tools: Sequence[Tool], *, many: bool) -> Grammar:
    """What follows the mark: a list of one call, or with ``many`` of any number of them."""
    rules = call_rules(tools, lambda name: f'{{"name": {name}, "arguments": ', "}")
    calls = 'call (", " call)*' if many else "call"
    return Grammar(Kind.LARK, "\n".join([f'start: "[" {calls} "]"', *rules]))
