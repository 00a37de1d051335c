"""Grammars of required calls: the parser of the same format reads all that they allow."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer

from diptych.runtime.grammar.matcher import new_matcher
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
}
SEVERAL = {"hermes": "\n".join, "mistral": lambda calls: calls[0][:-1] + ", " + calls[1][1:]}


def fits(call_format: ToolFormat, tools: list[Tool], many: bool, text: str) -> bool:
    matcher = new_matcher(call_format.grammar(tools, many=many), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def calls(call_format: ToolFormat, text: str) -> list[tuple[str, object]]:
    parser = call_format.parser_for(begun=True, names=[tool.name for tool in TOOLS])
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


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
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
    parser = call_format.parser_for(begun=False, names=["now"])
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
        ("<tool_call>\n<function=' + name + '>\n<parameter=' + key + '>", None),
        ("{{ '<tool_call>' + name }}\n<arg_key>{{ key }}</arg_key>", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }} {\"parameters\": 2}", None),
    ],
)
def test_format_of_recognises_the_template(template: str, name: str | None) -> None:
    call_format = format_of(template)
    assert (None if call_format is None else call_format.name) == name
