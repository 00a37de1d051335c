"""Tool calls of Kimi K2: a section of calls, each with its id, ``functions.name:0``, before its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.headed_calls import HeadedForm, headed_call_rules
from gateway.tools.json_calls import Spell, quoted
from gateway.tools.tool import Tool

SECTION: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
CALL: Final = "<|tool_call_begin|>"
CALL_END: Final = "<|tool_call_end|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
SIGN: Final = "tool_declare<|im_middle|>"  # in templates that leave the calls to the server
MARKERS: Final = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS)

FORM: Final = HeadedForm(
    SECTION,
    CALL,
    # The whole id is found before the name within it: later turns repeat it.
    re.compile(
        rf"{re.escape(CALL)}\s*(?=(?:functions\.)?([^\s<:]+):[0-9]+)([^\s<]+)\s*{re.escape(ARGUMENTS)}"
        r"\s*(?=\{)"
    ),
    (CALL_END, SECTION_END),
)


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of a section of one call, or with ``many`` of any number."""
    rules = headed_call_rules(
        tools,
        lambda name: f"{spell(CALL)} {quoted(f'functions.{name}:')} NUMBER {spell(ARGUMENTS)}",
        spell(CALL_END),
    )
    calls = "call+" if many else "call"
    start = f"start: {spell(SECTION)} {calls} {spell(SECTION_END)}"
    return Grammar(Kind.LARK, "\n".join([start, r"NUMBER: /[0-9]{1,3}/", *rules]))
