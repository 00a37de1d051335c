"""Pieces of Lark grammars for calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from diptych.runtime.grammar.matcher import embedded_schema
from gateway.tools.tool import Tool


def quoted(text: str) -> str:
    """A Lark literal: a JSON string is one."""
    return json.dumps(text)


def call_rules(tools: Sequence[Tool], head: Callable[[str], str], tail: str) -> list[str]:
    """Rules for ``call``: one of the tools, its arguments by its schema between head and tail.

    Args:
        head: the text before the arguments, made from the tool's name as a JSON string.
        tail: the text after them.
    """
    rules = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        arguments = embedded_schema(tool.arguments_schema)
        rules.append(f"call{number}: {quoted(head(json.dumps(tool.name)))} {arguments} {quoted(tail)}")
    return rules
