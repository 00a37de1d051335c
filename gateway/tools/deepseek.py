"""Tool calls of DeepSeek V3 and V3.1, a list between marks of their own.

V3 and R1 fence the arguments: ``…call▁begin｜>function<｜tool▁sep｜>name``, then ```` ```json ```` and the
object. V3.1 has them plain: ``…call▁begin｜>name<｜tool▁sep｜>{…}``. Both are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.headed_calls import HeadedForm, headed_call_rules
from gateway.tools.json_calls import Spell, quoted
from gateway.tools.tool import Tool

LIST: Final = "<｜tool▁calls▁begin｜>"
LIST_END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
MARKERS: Final = (LIST, LIST_END, CALL, CALL_END, SEPARATOR)
FENCE: Final = "```json"

_FENCED: Final = f"\n{FENCE}\n"
_FENCE_END: Final = quoted("\n```")
_BREAK: Final = quoted("\n")

FORM: Final = HeadedForm(
    LIST,
    CALL,
    re.compile(
        rf"{re.escape(CALL)}\s*(?:function\s*{re.escape(SEPARATOR)})?\s*([^\s<`{{]+)\s*"
        rf"(?:{re.escape(SEPARATOR)})?\s*(?:```(?:json)?)?\s*(?=\{{)"
    ),
    (CALL_END, LIST_END, "```"),
)


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of a list of one call, or with ``many`` of any number, in the form of V3.1."""
    rules = headed_call_rules(
        tools, lambda name: f"{spell(CALL)} {quoted(name)} {spell(SEPARATOR)}", spell(CALL_END)
    )
    return _list(rules, "call+" if many else "call", spell)


def fenced_grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the same grammar in the form of V3 and R1."""
    rules = headed_call_rules(
        tools,
        lambda name: f'{spell(CALL)} "function" {spell(SEPARATOR)} {quoted(name + _FENCED)}',
        f"{_FENCE_END} {spell(CALL_END)}",
    )
    return _list(rules, f"call ({_BREAK} call)*" if many else "call", spell)


def _list(rules: Sequence[str], calls: str, spell: Spell) -> Grammar:
    return Grammar(Kind.LARK, "\n".join([f"start: {spell(LIST)} {calls} {spell(LIST_END)}", *rules]))
