"""Conversations with tools, for templates that have none."""

from __future__ import annotations

import json

import pytest

from gateway.model.chat_template import Message
from gateway.model.plain_tool_turns import plain_tool_turns
from gateway.tools.tool import Tool, ToolCall

TOOLS = (Tool("weather", "Météo.", {"type": "object", "properties": {"city": {}}}), Tool("now"))
USER = Message("user", "Hi")


def plain(*messages: Message, system: bool = True, calls: bool = False) -> list[Message]:
    return plain_tool_turns(messages, TOOLS, system=system, calls=calls)


@pytest.mark.parametrize(
    ("messages", "system", "role", "begin"),
    [
        ((USER,), True, "system", "You can call"),
        ((Message("system", "Be brief."), USER), True, "system", "Be brief.\n\nYou can call"),
        ((USER,), False, "user", "Hi\n\nYou can call"),
    ],
)
def test_tools_are_described_in_the_first_turn(
    messages: tuple[Message, ...], system: bool, role: str, begin: str
) -> None:
    first, *rest = plain(*messages, system=system)
    assert (first.role, first.content.startswith(begin)) == (role, True)
    lines = first.content.splitlines()
    at = lines.index(next(line for line in lines if line.endswith("one a line:"))) + 1
    described = [json.loads(line) for line in lines[at : at + 2]]
    assert [one["name"] for one in described] == ["weather", "now"]
    assert described[0]["description"] == "Météo."
    assert rest == [one for one in messages if one.role == "user" and system]


def test_calls_and_results_are_plain_turns() -> None:
    calls = (ToolCall("weather", '{"city": "Rome"}', "1"), ToolCall("now", "{}", "2"))
    turns = (
        USER,
        Message("assistant", "", tool_calls=calls),
        Message("tool", "rain", tool_call_id="1"),
        Message("tool", "noon", tool_call_id="2"),
        Message("user", "And?"),
        Message("assistant", "Wet."),
    )
    _, user, call, results, last = plain(*turns)
    assert (user, last) == (USER, turns[-1])
    assert call == Message(
        "assistant", '{"name": "weather", "arguments": {"city": "Rome"}}\n{"name": "now", "arguments": {}}'
    )
    assert results == Message("user", "Result of weather: rain\nResult of now: noon\nAnd?")
    assert plain(*turns, calls=True)[1:] == list(turns)
