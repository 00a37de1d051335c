"""Tool calls of Llama 3: the output begins with ``{"name": …, "parameters": …}``.

Several are joined by ``;``, and a ``<|python_tag|>`` may stand before each. Text follows the last one. An
answer in JSON may look the same: without the tag, only the name of a tool makes it a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.json_calls import CallList, Spell, call_rules, quoted
from gateway.tools.parser import Parsed
from gateway.tools.tool import Tool

TAG: Final = "<|python_tag|>"
MARKERS: Final = (TAG,)

_BEFORE: Final = re.compile(rf"\s*(?:{re.escape(TAG)}\s*)?")
_BETWEEN: Final = re.compile(rf"[\s;,]*(?:{re.escape(TAG)}\s*)?")


class Llama3JsonParser:
    """Parser of calls at the beginning of an output.

    Args:
        names: of the tools; None: unknown, and any name is a tool's.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._list: CallList | None = CallList(_BEFORE, _BETWEEN, tag=TAG, names=names)

    def push(self, text: str) -> Parsed:
        if self._list is None:
            return Parsed(text)
        calls, after = self._list.push(text)
        if after is not None:
            self._list = None
        return Parsed(after or "", calls)

    def finish(self) -> Parsed:
        return Parsed("" if self._list is None else self._list.finish())


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, also with ``many``: the format has no agreed way to write several."""
    rules = call_rules(tools, lambda name: f'{{"name": {name}, "parameters": ', "}")
    return Grammar(Kind.LARK, "\n".join(["start: call", *rules]))
