"""Tool calls of Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter>…``.

A value stands on lines of its own. Strings are written as they are, other values as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.hermes import CLOSE, MARKERS, OPEN, HermesParser
from gateway.tools.json_calls import BegunCall, Spell, new_call_id, quoted
from gateway.tools.tool import Tool, ToolCall
from gateway.tools.written_arguments import WrittenArguments, argument_rules

__all__ = ["MARKERS", "begun_call", "grammar", "parser"]

SIGN: Final = "<function="
_MARK: Final = "</parameter>"
_END: Final = f"\n{_MARK}\n"
_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END: Final = re.compile(r"\s*</function>\s*")


def parser(tools: Sequence[Tool] | None) -> HermesParser:
    """Return a new parser of calls of ``tools``."""
    return HermesParser(partial(_read, arguments=WrittenArguments(tools)))


def begun_call(text: str, names: Collection[str], arguments: WrittenArguments) -> BegunCall | None:
    """Return the call of one of ``names`` that begins in ``text``, with its complete arguments as JSON."""
    head = _FUNCTION.search(text)
    if head is None or head[1].strip() not in names:
        return None
    name = head[1].strip()
    pairs, _ = _parameters(text, head.end())
    return BegunCall(name, arguments.as_json(name, pairs, complete=False))


def _read(text: str, *, arguments: WrittenArguments) -> ToolCall | None:
    head = _FUNCTION.match(text.lstrip())
    if head is None:
        return None
    name, body = head[1].strip(), text.lstrip()
    pairs, end = _parameters(body, head.end())
    if not _FUNCTION_END.fullmatch(body, end):
        return None
    return ToolCall(name, arguments.as_json(name, pairs, complete=True), new_call_id())


def _parameters(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    """Return the complete parameters from ``start`` on, and where they end."""
    pairs = []
    while (found := _PARAMETER.match(text, start)) is not None:
        pairs.append((found[1].strip(), found[2].removeprefix("\n").removesuffix("\n")))
        start = found.end()
    return pairs, start


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, or with ``many`` of any number, each on lines of its own."""
    rules = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        terms, more = argument_rules(
            tool, number, lambda key: f"<parameter={key}>\n", _END, _MARK, key=r"[^\x3e\n\x3c]{1,64}"
        )
        head = quoted(f"\n{SIGN}{tool.name}>\n")
        rules.append(
            f"call{number}: {spell(OPEN)} {head} {terms} {quoted('</function>' + chr(10))} {spell(CLOSE)}"
        )
        rules += more
    start = f"start: call ({quoted(chr(10))} call)*" if many else "start: call"
    return Grammar(Kind.LARK, "\n".join([start, *rules]))
