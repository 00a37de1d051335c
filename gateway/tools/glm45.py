"""Tool calls of GLM-4.5 and later: ``<tool_call>name``, then ``<arg_key>`` and ``<arg_value>`` in turns.

Strings are written as they are, other values as JSON.
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

SIGN: Final = "<arg_key>"
_MARK: Final = "</arg_value>"
_END: Final = f"{_MARK}\n"
_NAME: Final = re.compile(r"\s*(?:<tool_call>)?\s*([^\s<{]+)\s*(?=<arg_key>)")
_WHOLE_NAME: Final = re.compile(r"\s*([^\s<{]+)\s*(?=<arg_key>|\Z)")
_ARGUMENT: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def parser(tools: Sequence[Tool] | None) -> HermesParser:
    """Return a new parser of calls of ``tools``."""
    return HermesParser(partial(_read, arguments=WrittenArguments(tools)), open_ended=True)


def begun_call(text: str, names: Collection[str], arguments: WrittenArguments) -> BegunCall | None:
    """Return the call of one of ``names`` that begins in ``text``, with its complete arguments as JSON."""
    body = text[text.rfind(OPEN, 0, text.find(SIGN)) :] if OPEN in text.partition(SIGN)[0] else text
    head = _NAME.match(body)
    if head is None or head[1] not in names:
        return None
    pairs, _ = _pairs(body, head.end())
    return BegunCall(head[1], arguments.as_json(head[1], pairs, complete=False))


def _read(text: str, *, arguments: WrittenArguments) -> ToolCall | None:
    head = _WHOLE_NAME.match(text)
    if head is None:
        return None
    pairs, end = _pairs(text, head.end())
    if end != len(text):
        return None
    return ToolCall(head[1], arguments.as_json(head[1], pairs, complete=True), new_call_id())


def _pairs(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    """Return the complete arguments from ``start`` on, and where they end."""
    pairs = []
    while (found := _ARGUMENT.match(text, start)) is not None:
        pairs.append((found[1].strip(), found[2]))
        start = found.end()
    return pairs, start


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, or with ``many`` of any number, each on lines of its own."""
    rules = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        terms, more = argument_rules(
            tool,
            number,
            lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
            _END,
            _MARK,
            key=r"[^\x3c\n]{1,64}",
        )
        rules.append(f"call{number}: {spell(OPEN)} {quoted(tool.name + chr(10))} {terms} {spell(CLOSE)}")
        rules += more
    start = f"start: call ({quoted(chr(10))} call)*" if many else "start: call"
    return Grammar(Kind.LARK, "\n".join([start, *rules]))
