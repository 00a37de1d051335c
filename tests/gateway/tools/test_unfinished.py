"""What is left of a call at the end of an output: a fragment, nothing, or an answer's text."""

from __future__ import annotations

from functools import partial

import pytest

from gateway.tools.formats import FORMATS
from gateway.tools.json_calls import begun_call
from gateway.tools.tool import Tool
from gateway.tools.unfinished import UnfinishedCalls

CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": {"b": [1, "}"]}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": {"b": [1, "}"]}}}]',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": {"b": [1, "}"]}}}',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"a": {"b": [1, "}"]}}',
    "qwen3_coder": '<tool_call>\n<function=f>\n<parameter=a>\n{"b": [1, "}"]}\n</parameter>\n'
    "</function>\n</tool_call>",
    "glm45": '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{"b": [1, "}"]}</arg_value>\n</tool_call>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": {"b": [1, "}"]}}'
    "<｜tool▁call▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": {"b": [1, "}"]}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": {"b": [1, "}"]}}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": {"b": [1, "}"]}}',
}
# With these the name of the call is known.
NAMED = {
    "hermes": '"f"',
    "mistral": '"f"',
    "llama3_json": '"f"',
    "qwen3_coder": "=f>",
    "glm45": "f\n<arg_key>",
}
TOOL = Tool("f", "", {"properties": {"a": {"type": "object"}}})
ARGUMENTS = '{"a": {"b": [1, "}"]}}'


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("forced", [True, False])
def test_output_cut_anywhere_holds_no_markup(kind: object, forced: bool) -> None:
    found = next(one for one in FORMATS if one is kind)
    whole = CALLS[found.name]
    unfinished = UnfinishedCalls(found.begin([TOOL]), found.markers, forced)
    for end in range(1, len(whole) + 1):
        parser = found.parser([TOOL])
        pushed, last = parser.push(whole[:end]), parser.finish()
        read = unfinished.read(last.text, cut=True)
        calls = (*pushed.calls, *last.calls, *read.calls)
        assert len(calls) <= 1
        for call in calls:
            assert call.name == "f"
            assert ARGUMENTS.startswith(call.arguments_json)
        if forced:
            assert read.text == ""
        assert not any(marker in read.text for marker in found.markers)
        assert bool(calls) or NAMED.get(found.name, '{"a"') not in whole[:end]
    assert calls[0].arguments_json == ARGUMENTS


def test_text_is_kept_where_the_output_ended_by_itself() -> None:
    unfinished = UnfinishedCalls(partial(begun_call, names={"f"}), ("<tool_call>",), False)
    for text in ('<tool_call>{"name": "f"', '{"name": "f"', "plain"):
        assert unfinished.read(text, cut=False).text == text
    for text in ('{"name": "other", "arguments": {', '{"na', "plain", '{"name": "\\x"', "<"):
        assert unfinished.read(text, cut=True).text == text
