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


def fits(form: ToolFormat, tools: list[Tool], many: bool, text: str) -> bool:
    matcher = new_matcher(form.grammar(tools, many=many), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def calls(form: ToolFormat, text: str) -> list[tuple[str, object]]:
    parser = form.parser_for(begun=True, names=[tool.name for tool in TOOLS])
    parsed: Parsed = parser.push(text) + parser.finish()
    assert parsed.text == ""
    return [(call.name, json.loads(call.arguments_json)) for call in parsed.calls]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_format_parses_what_its_grammar_allows(form: ToolFormat) -> None:
    weather, now = WRITTEN[form.name]
    assert calls(form, weather) == [PARIS]
    for many in (False, True):
        assert fits(form, TOOLS, many, weather)
        assert fits(form, TOOLS, many, now)
        assert not fits(form, TOOLS[1:], many, weather)
        assert not fits(form, TOOLS, many, weather.replace("Paris", "London"))
        assert not fits(form, TOOLS, many, "Hello")
        assert not fits(form, TOOLS, many, weather[:-1])
    if form.name in SEVERAL:
        several = SEVERAL[form.name]([weather, now])
        assert calls(form, several) == [PARIS, ("now", {})]
        assert fits(form, TOOLS, True, several)
        assert not fits(form, TOOLS, False, several)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammar_constrains_arguments_to_an_object(form: ToolFormat) -> None:
    _, now = WRITTEN[form.name]
    some = now.replace("{}", '{"x": 1}')
    assert some != now
    for parameters, any_object in (
        ({}, False),
        ({"type": "object"}, True),
        ({"title": "any"}, True),
        ({"type": ["object", "null"]}, True),
    ):
        tool = [Tool("now", "", parameters)]
        assert fits(form, tool, False, now)
        assert fits(form, tool, False, some) is any_object
        assert not fits(form, tool, False, now.replace("{}", "null"))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_tool_names_tell_untagged_calls_from_answers(form: ToolFormat) -> None:
    answer = form.prompt_suffix + WRITTEN[form.name][0]
    parser = form.parser_for(begun=False, names=["now"])
    parsed = parser.push(answer) + parser.finish()
    assert parsed.text == (answer if form.name == "llama3_json" else "")
    assert len(parsed.calls) == (form.name != "llama3_json")


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
    form = format_of(template)
    assert (None if form is None else form.name) == name
