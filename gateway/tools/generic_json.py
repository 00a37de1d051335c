"""Tool calls of models whose chat template has no tools: ``{"name": …, "arguments": …}`` and nothing else.

`gateway.model.plain_tool_turns` asks for this form. An output that begins with a brace is a call, by grammar;
any other is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.json_calls import Spell, call_rules, quoted
from gateway.tools.tool import Tool

_TEXT: Final = r"TEXT: /[^{](.|\n)*/"


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, also with ``many``: small models do not end a list of calls."""
    return Grammar(Kind.LARK, "\n".join(["start: call", *_rules(tools)]))


def optional_grammar(tools: Sequence[Tool]) -> Grammar:
    """Return the grammar of one call or any text."""
    return Grammar(Kind.LARK, "\n".join(["start: call | TEXT |", _TEXT, *_rules(tools)]))


def _rules(tools: Sequence[Tool]) -> list[str]:
    return call_rules(tools, lambda name: f'{{"name": {name}, "arguments": ', "}")
