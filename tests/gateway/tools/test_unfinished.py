"""What is left of a call at the end of an output: a fragment, nothing, or an answer's text."""

from __future__ import annotations

import pytest

from gateway.tools.formats import FORMATS
from gateway.tools.unfinished import UnfinishedCalls

CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": {"b": [1, "}"]}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": {"b": [1, "}"]}}}]',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": {"b": [1, "}"]}}}',
}
ARGUMENTS = '{"a": {"b": [1, "}"]}}'


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("forced", [True, False])
def test_output_cut_anywhere_holds_no_markup(kind: object, forced: bool) -> None:
    found = next(one for one in FORMATS if one is kind)
    whole = CALLS[found.name]
    unfinished = UnfinishedCalls({"f"}, found.markers, forced)
    for end in range(1, len(whole) + 1):
        parser = found.parser(["f"])
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
        assert bool(calls) or '"f"' not in whole[:end]
    assert calls[0].arguments_json == ARGUMENTS


def test_text_is_kept_where_the_output_ended_by_itself() -> None:
    unfinished = UnfinishedCalls({"f"}, ("<tool_call>",), False)
    for text in ('<tool_call>{"name": "f"', '{"name": "f"', "plain"):
        assert unfinished.read(text, cut=False).text == text
    for text in ('{"name": "other", "arguments": {', '{"na', "plain", '{"name": "\\x"', "<"):
        assert unfinished.read(text, cut=True).text == text
