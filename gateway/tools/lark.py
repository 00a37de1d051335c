"""Pieces of Lark grammars for calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from gateway.tools.tool import Tool
from runtime.grammar.matcher import WHITE_SPACE


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
        schema = json.dumps(dict(tool.arguments_schema) | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}})
        rules.append(f"call{number}: {quoted(head(json.dumps(tool.name)))} %json {schema} {quoted(tail)}")
    return rules
