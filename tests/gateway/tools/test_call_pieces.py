"""Calls in pieces: joined, they are the calls that the same parser finds in a whole text."""

from __future__ import annotations

import pytest

from gateway.tools.call_pieces import CallPieces
from gateway.tools.formats import FORMATS, ToolFormat
from gateway.tools.parser import Parsed, ToolCallParser
from gateway.tools.tool import Tool, ToolCall
from tests.gateway.tools.test_formats import SEVERAL, TOOLS, WRITTEN, written

CUTS = (1, 2, 5, 1000)
HERMES, *_ = FORMATS


def in_pieces(call_format: ToolFormat, tools: list[Tool]) -> CallPieces:
    parser = call_format.parser_for(begun=True, tools=tools)
    return CallPieces(parser, call_format.begin(tools), rewritten=call_format.rewritten)


def read(parser: ToolCallParser, text: str, cut: int) -> list[Parsed]:
    pieces = [parser.push(text[at : at + cut]) for at in range(0, len(text), cut)]
    return [*pieces, parser.finish()]


def joined(parsed: list[Parsed]) -> tuple[str, list[tuple[str, str]]]:
    """Return text and calls, the pieces of each call put together."""
    calls: list[tuple[str, str]] = []
    for call in (call for piece in parsed for call in piece.calls):
        if call.id:
            calls.append((call.name, call.arguments_json))
        else:
            name, arguments = calls.pop()
            calls.append((name, arguments + call.arguments_json))
    return "".join(piece.text for piece in parsed), calls


def texts(call_format: ToolFormat) -> list[str]:
    several = SEVERAL.get(call_format.name, "; ".join)
    whole = several(WRITTEN[call_format.name])
    return [
        *WRITTEN[call_format.name],
        whole,
        whole.replace('"Paris"', r'"a } ] > \" { \\"'),
        whole.replace('"arguments"', '"parameters"'),
        whole.replace('{"city":"Paris"}', r'"{\"city\": 1}"'),  # a string, which comes whole
        whole.replace("get_weather", "unknown"),
        whole[:-12],
        f'{{"x": {{"name": "now", "arguments": {{}}}}}} {whole}',
        "no call",
    ]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_pieces_join_to_the_whole_calls(call_format: ToolFormat, cut: int) -> None:
    for text in texts(call_format):
        expected = joined(read(call_format.parser_for(begun=True, tools=TOOLS), text, 1000))
        found = joined(read(in_pieces(call_format, TOOLS), text, cut))
        if found != expected:  # of a call that is cut off its beginning was sent, and no markers
            shown, calls = found
            assert text == texts(call_format)[-3]
            assert (shown, calls[:-1]) == ("", expected[1])
            assert call_format.rewritten or calls[-1][1] in text


def test_name_and_id_come_first_and_arguments_as_they_are_written() -> None:
    parser = in_pieces(HERMES, TOOLS)
    begin = '<tool_call>\n{"name": "get_weather", "arguments": {'
    (first,) = parser.push(begin).calls
    assert (first.name, first.arguments_json, first.partial, len(first.id)) == ("get_weather", "{", True, 9)
    for piece in ('"city": ', '"Pa', 'ris"', "}"):
        assert parser.push(piece).calls == (ToolCall("", piece, partial=True),)
    assert parser.push("}\n</tool_call").calls == ()
    (last,) = parser.push(">").calls
    assert (last.arguments_json, last.partial) == ("", False)


def test_call_of_a_tool_that_was_not_offered_comes_whole() -> None:
    text = WRITTEN["hermes"][0]
    pieces = read(in_pieces(HERMES, TOOLS[1:]), text, 3)
    (call,) = [call for piece in pieces for call in piece.calls]
    assert (call.name, call.arguments_json, call.partial) == ("get_weather", '{"city":"Paris"}', False)


@pytest.mark.parametrize("call_format", [one for one in FORMATS if one.rewritten], ids=lambda one: one.name)
def test_arguments_that_are_written_one_by_one_come_one_by_one(call_format: ToolFormat) -> None:
    tool = Tool("f", "", {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}})
    text = written(call_format, "f", a="x > y", b="12")
    pieces = [call for parsed in read(in_pieces(call_format, [tool]), text, 1) for call in parsed.calls]
    assert [one.arguments_json for one in pieces] == ["{", '"a": "x > y"', ', "b": 12', "}"]
    assert [one.name for one in pieces] == ["f", "", "", ""]
    assert [one.partial for one in pieces] == [True, True, True, False]
