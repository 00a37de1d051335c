"""Validation of tools, tool choice and calls in messages, at each limit; templates without tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.runtime.errors import DiptychError, InvalidParameter, UnsupportedFeature
from diptych.runtime.grammar.grammar import Grammar, Kind
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.tool_support import ToolSupport
from gateway.request.structured_output import Constraint
from gateway.request.validate_tools import constraint_of, tool_call_id, tool_calls, toolbox
from gateway.tools.formats import FORMATS
from gateway.tools.tool import Mode

ALL = ToolSupport(tools=True, calls=True, turns=True, call_format=FORMATS[0])
MODES = pb.ToolChoice


def chat(*names: str, mode: int = 0, name: str = "", **tool: Any) -> pb.ChatPrompt:
    tools = [pb.Tool(name=one, **tool) for one in names]
    return pb.ChatPrompt(tools=tools, tool_choice=MODES(mode=mode, name=name))  # type: ignore[arg-type]


def field_of(kind: type[DiptychError], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    (violation,) = caught.value.violations
    return violation.field


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (MODES.MODE_UNSPECIFIED, Mode.AUTO),
        (MODES.MODE_AUTO, Mode.AUTO),
        (MODES.MODE_NONE, Mode.NONE),
        (MODES.MODE_REQUIRED, Mode.REQUIRED),
    ],
)
def test_tool_choice_modes_are_parsed(mode: int, expected: Mode) -> None:
    found = toolbox(chat("a", mode=mode), ALL)
    assert found is not None
    assert found.mode is expected
    assert (constraint_of(found, ALL, None) is not None) == (expected is Mode.REQUIRED)


def test_named_tool_choice_must_be_a_tool() -> None:
    found = toolbox(chat("a", "b", mode=MODES.MODE_NAMED, name="b"), ALL)
    assert found is not None
    assert [tool.name for tool in found.callable] == ["b"]
    for name in ("c", ""):
        asked = chat("a", mode=MODES.MODE_NAMED, name=name)
        assert field_of(InvalidParameter, lambda asked=asked: toolbox(asked, ALL)) == "chat.tool_choice.name"


def test_parallel_tool_calls_can_be_disabled() -> None:
    for mode in (MODES.MODE_AUTO, MODES.MODE_REQUIRED):
        asked = chat("a", mode=mode)
        found = {}
        for parallel in (None, True, False):
            if parallel is not None:
                asked.tool_choice.parallel = parallel
            found[parallel] = toolbox(asked, ALL)
        assert [tools and tools.single for tools in found.values()] == [False, False, True]
    several, one = (constraint_of(found[parallel], ALL, None) for parallel in (True, False))
    assert several is not None
    assert one is not None
    assert "call)*" in several.grammar.text
    assert "call)*" not in one.grammar.text


def test_request_without_tools_has_no_toolbox() -> None:
    assert toolbox(chat(), ALL) is None
    assert toolbox(chat(mode=MODES.MODE_NONE), ToolSupport()) is None
    for mode in (MODES.MODE_REQUIRED, MODES.MODE_NAMED):
        assert (
            field_of(InvalidParameter, lambda mode=mode: toolbox(chat(mode=mode), ALL)) == "chat.tool_choice"
        )
    assert field_of(InvalidParameter, lambda: toolbox(chat(mode=77), ALL)) == "chat.tool_choice.mode"


def test_tools_unsupported_by_the_template_are_refused() -> None:
    assert field_of(UnsupportedFeature, lambda: toolbox(chat("a"), ToolSupport())) == "chat.tools"
    formless = ToolSupport(tools=True)
    assert field_of(UnsupportedFeature, lambda: toolbox(chat("a"), formless)) == "chat.tools"
    assert toolbox(chat("a", mode=MODES.MODE_NONE), formless) is not None
    call = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")])
    assert field_of(UnsupportedFeature, lambda: tool_calls("m", call, formless)) == "m.tool_calls"
    turn = pb.ChatMessage(role="tool", content="1")
    assert field_of(UnsupportedFeature, lambda: tool_call_id("m", turn, formless)) == "m.role"


def test_tools_are_refused_above_their_limits() -> None:
    names = [f"t{number}" for number in range(limits.MAX_TOOLS + 1)]
    assert toolbox(chat(*names[:-1]), ALL)
    assert field_of(InvalidParameter, lambda: toolbox(chat(*names), ALL)) == "chat.tools"
    assert toolbox(chat("a" * limits.MAX_TOOL_NAME_CHARS), ALL)
    assert toolbox(chat("météo", "天気"), ALL)
    for name in ("a" * (limits.MAX_TOOL_NAME_CHARS + 1), "", "a b", "<|im_end|>", "a\n"):
        assert field_of(InvalidParameter, lambda name=name: toolbox(chat(name), ALL)) == "chat.tools[0].name"
    assert field_of(InvalidParameter, lambda: toolbox(chat("a", "b", "a"), ALL)) == "chat.tools[2].name"
    assert toolbox(chat("a", parameters_json_schema=r'{"title": "\ud83d\ude00"}'), ALL)
    for schema in ("[]", "{", "{" * 100, "x" * (limits.MAX_GRAMMAR_BYTES + 1), r'{"title": "\ud83d"}'):
        asked = chat("a", parameters_json_schema=schema)
        path = "chat.tools[0].parameters_json_schema"
        assert field_of(InvalidParameter, lambda asked=asked: toolbox(asked, ALL)) == path


def test_tools_together_are_measured_before_any_schema_is_read() -> None:
    """64 KiB each would be 8 MiB of JSON to parse before the refusal."""
    size = limits.MAX_PROMPT_BYTES // 16
    names = [f"t{number}" for number in range(17)]
    schema = '{"title": "' + "x" * (size - 64) + '"}'
    assert toolbox(chat(*names[:-1], parameters_json_schema=schema), ALL)
    broken = chat(*names, parameters_json_schema="{" * size)
    assert field_of(InvalidParameter, lambda: toolbox(broken, ALL)) == "chat.tools"


def test_tool_parameters_must_be_an_object_schema() -> None:
    for given in ("", "{}"):
        found = toolbox(chat("a", parameters_json_schema=given), ALL)
        assert found is not None
        assert found.tools[0].parameters == {}
    for good in ('{"type": "object"}', '{"type": ["null", "object"]}', '{"title": "any"}'):
        found = toolbox(chat("a", parameters_json_schema=good), ALL)
        assert found is not None
        assert found.tools[0].parameters == json.loads(good)
    for kind in (
        '"integer"',
        '"array"',
        '"string"',
        "null",
        "[]",
        '["string", "null"]',
        "{}",
        '["object-like"]',
    ):
        bad = chat("a", parameters_json_schema=f'{{"type": {kind}}}')
        path = "chat.tools[0].parameters_json_schema"
        assert field_of(InvalidParameter, lambda bad=bad: toolbox(bad, ALL)) == path


def test_calls_in_messages_are_refused_above_their_limits() -> None:
    def turn(count: int = 1, role: str = "assistant", **call: Any) -> pb.ChatMessage:
        given = {"name": "f", "arguments_json": "{}"} | call
        return pb.ChatMessage(role=role, tool_calls=[pb.ToolCall(**given) for _ in range(count)])

    def field(**change: Any) -> str:
        return field_of(InvalidParameter, lambda: tool_calls("m", turn(**change), ALL))

    assert len(tool_calls("m", turn(limits.MAX_TOOL_CALLS), ALL)) == limits.MAX_TOOL_CALLS
    assert field(count=limits.MAX_TOOL_CALLS + 1) == "m.tool_calls"
    assert field(role="user") == "m.tool_calls"
    assert tool_calls("m", turn(arguments_json=""), ALL)[0].arguments_json == "{}"
    long = '{"x": "' + "x" * limits.MAX_GRAMMAR_BYTES + '"}'
    for broken_off in ("[]", "1", "{", r'{"x": "\ud83d"}'):  # as models write them
        assert tool_calls("m", turn(arguments_json=broken_off), ALL)[0].arguments_json == broken_off
    for arguments in ("{" * 100, long):
        assert field(arguments_json=arguments) == "m.tool_calls[0].arguments_json"
    for good in ("a" * limits.MAX_TOOL_CALL_ID_CHARS, "functions.get:0", "call_1|fc_2", "get weather", "é"):
        (call,) = tool_calls("m", turn(id=good, name=good), ALL)
        assert (call.id, call.name) == (good, good)
        assert tool_call_id("m", pb.ChatMessage(role="tool", tool_call_id=good), ALL) == good
    for bad in ("a" * (limits.MAX_TOOL_CALL_ID_CHARS + 1), "<|im_end|>", "[INST]", "a\n", "\x1b", "\u200b"):
        assert field(id=bad) == "m.tool_calls[0].id"
        assert field(name=bad) == "m.tool_calls[0].name"
        answer = pb.ChatMessage(role="tool", tool_call_id=bad)
        path = field_of(InvalidParameter, lambda answer=answer: tool_call_id("m", answer, ALL))
        assert path == "m.tool_call_id"
    assert field(name="") == "m.tool_calls[0].name"
    colored = json.dumps({"text": "\x1b[31mred\x1b[0m " * 40})
    assert tool_calls("m", turn(arguments_json=colored), ALL)[0].arguments_json == colored
    user = pb.ChatMessage(role="user", tool_call_id="1")
    assert field_of(InvalidParameter, lambda: tool_call_id("m", user, ALL)) == "m.tool_call_id"


def test_required_calls_exclude_another_constraint() -> None:
    asked = Constraint("structured_output.regex", Grammar(Kind.REGEX, "a"))
    auto, forced = toolbox(chat("a"), ALL), toolbox(chat("a", mode=MODES.MODE_REQUIRED), ALL)
    assert constraint_of(None, ALL, asked) is asked
    assert constraint_of(auto, ALL, asked) is asked
    path = field_of(InvalidParameter, lambda: constraint_of(forced, ALL, asked))
    assert path == "structured_output.regex"


def test_required_call_grammar_is_checked_tool_by_tool() -> None:
    found = constraint_of(toolbox(chat("a", "b", mode=MODES.MODE_NAMED, name="b"), ALL), ALL, None)
    assert found is not None
    assert found.path == "chat.tool_choice"
    assert [path for path, _ in found.parts] == ["chat.tools[1].parameters_json_schema"]
