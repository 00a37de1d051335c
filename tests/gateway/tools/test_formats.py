"""Grammars of required calls: the parser of the same format reads all that they allow."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from llguidance import LLTokenizer

from diptych.runtime.grammar.matcher import new_matcher
from gateway.tools import deepseek, kimi_k2
from gateway.tools.formats import FORMATS, ToolFormat, format_of
from gateway.tools.parser import Parsed
from gateway.tools.tool import Tool

BYTES = LLTokenizer("byte")
TOOLS = [
    Tool(
        "get_weather",
        "",
        {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    ),
    Tool("now", "", {"additionalProperties": False}),
]
PARIS = ("get_weather", {"city": "Paris"})
WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "mistral": [
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '[{"name": "now", "arguments": {}}]',
    ],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city":"Paris"}}',
        '{"name": "now", "parameters": {}}',
    ],
    "mistral_args": ['get_weather[ARGS]{"city":"Paris"}', "now[ARGS]{}"],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
    "glm45": [
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "<tool_call>now\n</tool_call>",
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":"Paris"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city":"Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city":"Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "harmony": [
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}',
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    ],
}


def _one_list(begin: str, end: str, between: str = "") -> Callable[[list[str]], str]:
    """Return what joins the calls of several lists to one list."""
    return lambda calls: begin + between.join(one[len(begin) : -len(end)] for one in calls) + end


SEVERAL: dict[str, Callable[[list[str]], str]] = {
    "hermes": "\n".join,
    "mistral": lambda calls: calls[0][:-1] + ", " + calls[1][1:],
    "mistral_args": "[TOOL_CALLS]".join,
    "qwen3_coder": "\n".join,
    "glm45": "\n".join,
    "deepseek_v31": _one_list(deepseek.LIST, deepseek.LIST_END),
    "deepseek_v3": _one_list(deepseek.LIST, deepseek.LIST_END, "\n"),
    "kimi_k2": _one_list(kimi_k2.SECTION, kimi_k2.SECTION_END),
}


TYPED = Tool(
    "typed",
    "",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 2},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/one"}},
            "either": {"type": ["string", "null"]},
            "kind": {"enum": ["a", 1]},
        },
        "required": ["text"],
        "$defs": {"one": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
)
OPEN = Tool("open", "", {"type": "object"})


def written(call_format: ToolFormat, name: str, **arguments: str) -> str:
    """Return a call in one of the two formats that write arguments one by one."""
    if call_format.name == "qwen3_coder":
        body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize(
    "call_format", [one for one in FORMATS if one.rewritten], ids=lambda call_format: call_format.name
)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"text": "a <b>\n</p> {\"} é"}, {"text": 'a <b>\n</p> {"} é'}),
        ({"text": "12", "count": "12"}, {"text": "12", "count": 12}),
        ({"text": "no", "flag": "true", "list": '[{"x":1.5}]'},
         {"text": "no", "flag": True, "list": [{"x": 1.5}]}),
        ({"text": "\n\nab\n", "either": "null"}, {"text": "\n\nab\n", "either": None}),
        ({"text": "ab", "kind": "a"}, {"text": "ab", "kind": "a"}),
    ],
)  # fmt: skip
def test_written_arguments_have_the_types_of_their_schema(
    call_format: ToolFormat, arguments: dict[str, str], expected: object
) -> None:
    text = written(call_format, "typed", **arguments)
    assert fits(call_format, [TYPED], False, text)
    parser = call_format.parser_for(begun=True, tools=[TYPED])
    (call,) = (parser.push(text) + parser.finish()).calls
    assert json.loads(call.arguments_json) == expected


@pytest.mark.parametrize(
    "call_format", [one for one in FORMATS if one.rewritten], ids=lambda call_format: call_format.name
)
def test_grammar_of_written_arguments_refuses_what_the_schema_does(call_format: ToolFormat) -> None:
    for arguments in (
        {},
        {"text": "a"},
        {"text": "ab", "count": "x"},
        {"text": "ab", "flag": "True"},
        {"text": "ab", "kind": "b"},
        {"text": "ab", "list": "[1]"},
        {"text": "ab", "other": "x"},
    ):
        assert not fits(call_format, [TYPED], False, written(call_format, "typed", **arguments))
    assert fits(call_format, [OPEN], False, written(call_format, "open", x="1", y="two"))
    assert not fits(call_format, [Tool("open")], False, written(call_format, "open", x="1"))
    # Models of Python templates write its constants, and what has no type is a string.
    parser = call_format.parser_for(begun=True, tools=[TYPED])
    (call,) = parser.push(written(call_format, "typed", flag="True", count="many", other="5")).calls
    assert json.loads(call.arguments_json) == {"flag": True, "count": "many", "other": "5"}


def fits(call_format: ToolFormat, tools: list[Tool], many: bool, text: str) -> bool:
    matcher = new_matcher(call_format.grammar(tools, many=many), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def calls(call_format: ToolFormat, text: str) -> list[tuple[str, object]]:
    parser = call_format.parser_for(begun=True, tools=TOOLS)
    parsed: Parsed = parser.push(text) + parser.finish()
    assert parsed.text == ""
    return [(call.name, json.loads(call.arguments_json)) for call in parsed.calls]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_format_parses_what_its_grammar_allows(call_format: ToolFormat) -> None:
    weather, now = WRITTEN[call_format.name]
    assert calls(call_format, weather) == [PARIS]
    for many in (False, True):
        assert fits(call_format, TOOLS, many, weather)
        assert fits(call_format, TOOLS, many, now)
        assert not fits(call_format, TOOLS[1:], many, weather)
        assert not fits(call_format, TOOLS, many, weather.replace("Paris", "London"))
        assert not fits(call_format, TOOLS, many, "Hello")
        assert not fits(call_format, TOOLS, many, weather[:-1])
    if call_format.name in SEVERAL:
        several = SEVERAL[call_format.name]([weather, now])
        assert calls(call_format, several) == [PARIS, ("now", {})]
        assert fits(call_format, TOOLS, True, several)
        assert not fits(call_format, TOOLS, False, several)


@pytest.mark.parametrize(
    "call_format", [one for one in FORMATS if not one.rewritten], ids=lambda call_format: call_format.name
)
def test_grammar_constrains_arguments_to_an_object(call_format: ToolFormat) -> None:
    _, now = WRITTEN[call_format.name]
    some = now.replace("{}", '{"x": 1}')
    assert some != now
    for parameters, any_object in (
        ({}, False),
        ({"type": "object"}, True),
        ({"title": "any"}, True),
        ({"type": ["object", "null"]}, True),
    ):
        tool = [Tool("now", "", parameters)]
        assert fits(call_format, tool, False, now)
        assert fits(call_format, tool, False, some) is any_object
        assert not fits(call_format, tool, False, now.replace("{}", "null"))


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_tool_names_tell_untagged_calls_from_answers(call_format: ToolFormat) -> None:
    answer = call_format.prompt_suffix + WRITTEN[call_format.name][0]
    parser = call_format.parser_for(begun=False, tools=[Tool("now")])
    parsed = parser.push(answer) + parser.finish()
    assert parsed.text == (answer if call_format.name == "llama3_json" else "")
    assert len(parsed.calls) == (call_format.name != "llama3_json")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ \'<tool_call>\' }} {"name": 1, "parameters": 2}', "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ messages }}", None),
        # Qwen3-Coder, GLM 4.5 and Mistral Small 3.2, which may show tools as Llama 3's templates do.
        ("<tool_call>\n<function=' + name + '>\n<parameter=' + key + '>", "qwen3_coder"),
        ("{{ '<tool_call>' + name }}\n<arg_key>{{ key }}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }} {\"parameters\": 2}", "mistral_args"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("{{ '<｜tool▁calls▁begin｜>' + name + '\n```json\n' }}", "deepseek_v3"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "harmony"),
    ],
)
def test_format_of_recognises_the_template(template: str, name: str | None) -> None:
    call_format = format_of(template)
    assert (None if call_format is None else call_format.name) == name
