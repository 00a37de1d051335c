"""Tool calls of Mistral's models since Small 3.2: ``[TOOL_CALLS]name[ARGS]{…}``, a mark before each call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.headed_calls import HeadedForm, headed_call_rules
from gateway.tools.json_calls import Spell, quoted
from gateway.tools.mistral import MARK
from gateway.tools.tool import Tool

ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"  # before the arguments, in some versions
MARKERS: Final = (MARK, ARGS, CALL_ID)

FORM: Final = HeadedForm(MARK, "", re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*(?=\{)"))


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of the text after the mark: one call, or with ``many`` more with a mark each."""
    rules = headed_call_rules(tools, lambda name: f"{quoted(name)} {spell(ARGS)}")
    start = f"start: call ({spell(MARK)} call)*" if many else "start: call"
    return Grammar(Kind.LARK, "\n".join([start, *rules]))
