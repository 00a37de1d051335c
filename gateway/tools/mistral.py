"""Tool calls of Mistral's models: ``[TOOL_CALLS][{"name": …, "arguments": …}, …]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.json_calls import CallList, Spell, call_rules, quoted
from gateway.tools.parser import Marker, Parsed
from gateway.tools.tool import Tool

MARK: Final = "[TOOL_CALLS]"
MARKERS: Final = (MARK,)

_BEFORE: Final = re.compile(r"\s*\[?\s*")
_BETWEEN: Final = re.compile(r"[\s;,]*")
_END: Final = "]"


class MistralParser:
    """Parser of lists of calls, each after a mark, with text between them.

    Args:
        begun: the prompt ends with the mark.
    """

    def __init__(self, *, begun: bool = False) -> None:
        self._marker = Marker(MARK)
        self._list = _calls() if begun else None  # the current list
        self._mark = ""  # text as well if no call follows it
        self._just_called = False  # only white space since the last list

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
        """End the list. The mark of a list without calls is text, which is returned."""
        self._list, self._just_called = None, calls.called
        return Parsed("" if calls.called else self._mark)


def _calls() -> CallList:
    return CallList(_BEFORE, _BETWEEN, end=_END)


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of the text after the mark: a list of one call, or with ``many`` of any number."""
    rules = call_rules(tools, lambda name: f'{{"name": {name}, "arguments": ', "}")
    calls = 'call (", " call)*' if many else "call"
    return Grammar(Kind.LARK, "\n".join([f'start: "[" {calls} "]"', *rules]))
