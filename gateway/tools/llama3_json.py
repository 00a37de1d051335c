"""Calls as Llama 3 writes them: the whole output is ``{"name": …, "parameters": …}``.

Several are joined by ``;``, and a ``<|python_tag|>`` may stand before the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.tools.json_objects import JsonObjects
from gateway.tools.lark import call_rules
from gateway.tools.parser import Parsed, call_from_json
from gateway.tools.tool import Tool
from runtime.grammar.grammar import Grammar, Kind

TAG: Final = "<|python_tag|>"
MARKERS: Final = (TAG,)


class Llama3JsonParser:
    """Holds back an output that begins like a call until it is one, or is not."""

    def __init__(self) -> None:
        self._held: str | None = ""  # None: the output is text
        self._objects = JsonObjects()
        self._called = False

    def push(self, text: str) -> Parsed:
        if self._held is None:
            return Parsed(text)
        self._held += text
        begins = self._held.lstrip()
        if not self._called and not begins.startswith("{") and not begins.startswith(TAG):
            return Parsed() if TAG.startswith(begins) else self._as_text()
        result = Parsed()
        for found in self._objects.push(text):
            call = call_from_json(found, arguments="parameters")
            if call is None:
                return result + self._as_text()
            result += Parsed(calls=(call,))
            self._called, self._held = True, ""
        return result

    def finish(self) -> Parsed:
        if self._called and not self._objects.inside:
            return Parsed()  # what follows a call is separators
        return self._as_text()

    def _as_text(self) -> Parsed:
        held, self._held = self._held or "", None
        return Parsed(held)


def grammar(tools: Sequence[Tool], *, many: bool) -> Grammar:
    """One call. The format has no agreed way to write several, whatever ``many`` says."""
    rules = call_rules(tools, lambda name: f'{{"name": {name}, "parameters": ', "}")
    return Grammar(Kind.LARK, "\n".join(["start: call", *rules]))
