"""Calls as Mistral's models write them: ``[TOOL_CALLS][{"name": …, "arguments": …}, …]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.call_list import CallList
from gateway.tools.lark import call_rules
from gateway.tools.parser import Marker, Parsed
from gateway.tools.tool import Tool

MARK: Final = "[TOOL_CALLS]"
MARKERS: Final = (MARK,)

_BEFORE: Final = re.compile(r"\s*\[?\s*")
_BETWEEN: Final = re.compile(r"[\s;,]*")
_END: Final = "]"


class MistralParser:
    """After a mark there is a list of calls, and text after the list.

    Args:
        begun: the mark was put into the prompt.
    """

    def __init__(self, *, begun: bool = False) -> None:
        self._marker = Marker(MARK)
        self._list = _calls() if begun else None  # that we are in
        self._mark = ""  # what is text, too, if no call comes after it
        self._just_called = False  # and nothing but white space since

    def push(self, text: str) -> Parsed:
        result = Parsed()
        rest: str | None = text
        while rest is not None:
            if self._list is None:
                shown, rest = self._marker.push(rest)
                self._just_called &= not shown
                result += Parsed(shown)
                if rest is not None:
                    self._list, self._mark = _calls(), self._marker.found
                continue
            calls, rest = self._list.push(rest)
            result += Parsed(calls=calls)
            if rest is not None:
                result += self._leave(self._list)
        return result

    def finish(self) -> Parsed:
        if self._list is not None:
            held = self._list.finish()
            return self._leave(self._list) + Parsed(held)
        held = self._marker.flush()
        return Parsed("" if self._just_called and held.isspace() else held)

    def _leave(self, calls: CallList) -> Parsed:
        """The list is over. The mark of one without calls is text."""
        self._list, self._just_called = None, calls.called
        return Parsed("" if calls.called else self._mark)


def _calls() -> CallList:
    return CallList(_BEFORE, _BETWEEN, end=_END)


def grammar(tools: Sequence[Tool], *, many: bool) -> Grammar:
    """What follows the mark: a list of one call, or with ``many`` of any number of them."""
    rules = call_rules(tools, lambda name: f'{{"name": {name}, "arguments": ', "}")
    calls = 'call (", " call)*' if many else "call"
    return Grammar(Kind.LARK, "\n".join([f'start: "[" {calls} "]"', *rules]))
