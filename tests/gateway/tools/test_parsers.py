"""Tool call parsers on the output of models, for every cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools import deepseek, glm45, mistral_args, qwen3_coder
from gateway.tools.harmony import HarmonyCallParser
from gateway.tools.headed_calls import HeadedCallParser
from gateway.tools.hermes import HermesParser
from gateway.tools.llama3_json import Llama3JsonParser
from gateway.tools.mistral import MistralParser
from gateway.tools.parser import FirstCall, Parsed, ToolCallParser

Make = Callable[[], ToolCallParser]
Call = tuple[str, object]

BEGUN: Make = lambda: MistralParser(begun=True)  # noqa: E731
LISTED: Make = lambda: Llama3JsonParser(["a", "b"])  # noqa: E731


ARGS: Make = lambda: HeadedCallParser(mistral_args.FORM)  # noqa: E731
ARGS_BEGUN: Make = lambda: HeadedCallParser(mistral_args.FORM, begun=True)  # noqa: E731
DEEPSEEK: Make = lambda: HeadedCallParser(deepseek.FORM)  # noqa: E731
CODER: Make = lambda: qwen3_coder.parser(None)  # noqa: E731
GLM: Make = lambda: glm45.parser(None)  # noqa: E731
CODER_CALL = "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = (
    "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>y</arg_key>\n<arg_value> two\n</arg_value>\n</tool_call>"
)
HARMONY_CALL = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x": 1}'


def read(make: Make, pieces: list[str]) -> tuple[str, list[Call]]:
    """Return the text outside calls, and the calls."""
    parser = make()
    result = Parsed()
    for piece in pieces:
        result += parser.push(piece)
    result += parser.finish()
    ids = [call.id for call in result.calls]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    return result.text, [(call.name, json.loads(call.arguments_json)) for call in result.calls]


A = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
TRICKY = '{"name": "t", "arguments": {"x": "</tool_call> } \\" {"}}'
CASES: list[tuple[Make, str, str, list[Call]]] = [
    (HermesParser, "no call <tool", "no call <tool", []),
    (HermesParser, A, "", [("a", {"x": 1})]),
    (HermesParser, f"I will.\n\n{A}", "I will.", [("a", {"x": 1})]),
    (HermesParser, f"{A}\n{A} \n", "", [("a", {"x": 1})] * 2),
    (HermesParser, f"{A}\nDone. ", "\nDone. ", [("a", {"x": 1})]),
    (HermesParser, f"<tool_call>{TRICKY}</tool_call>", "", [("t", {"x": '</tool_call> } " {'})]),
    (HermesParser, '<tool_call>{"name": "a", "arguments": {}}', "", [("a", {})]),
    (HermesParser, '<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
    (HermesParser, '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "", [("a", {})]),
    (HermesParser, r'<tool_call>{"name": "a", "arguments": " {\"x\": 1}"}</tool_call>', "",
     [("a", {"x": 1})]),
    (HermesParser, '<tool_call>{"name": "a", "arguments": "Paris"}</tool_call>',
     '<tool_call>{"name": "a", "arguments": "Paris"}</tool_call>', []),
    (HermesParser, '<tool_call>{"name": "a", "arguments": "[1]"}',
     '<tool_call>{"name": "a", "arguments": "[1]"}', []),
    (HermesParser, r'<tool_call>{"name": "a", "arguments": "{\"x\": NaN}"}',
     r'<tool_call>{"name": "a", "arguments": "{\"x\": NaN}"}', []),
    (HermesParser, '<tool_call>{"name": "a", "arguments": ""}',
     '<tool_call>{"name": "a", "arguments": ""}', []),
    # Called by the other's word; and members that are neither's.
    (HermesParser, '<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", [("a", {"x": 1})]),
    (HermesParser, '<tool_call>{"name": "a", "x": 1}</tool_call>',
     '<tool_call>{"name": "a", "x": 1}</tool_call>', []),
    (Llama3JsonParser, '{"name": "a", "arguments": {"x": 1}}', "", [("a", {"x": 1})]),
    (Llama3JsonParser, '{"name": "John", "age": 5}', '{"name": "John", "age": 5}', []),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "parameters": {"x": 1}}]', "", [("a", {"x": 1})]),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "x": {}}]', '[TOOL_CALLS][{"name": "a", "x": {}}]', []),
    (HermesParser, '<tool_call>{"name": "a", "arguments": [1]}',
     '<tool_call>{"name": "a", "arguments": [1]}', []),
    (HermesParser, '<tool_call>[{"name": "a"}]</tool_call>', '<tool_call>[{"name": "a"}]</tool_call>', []),
    (HermesParser, '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', []),
    (Llama3JsonParser, '{"name": "a", "parameters": {"x": -Infinity}}',
     '{"name": "a", "parameters": {"x": -Infinity}}', []),
    # Half of a surrogate pair is no text, and so neither a name nor what a quoted object says.
    (HermesParser, r'<tool_call>{"name": "\ud83d"}</tool_call>',
     r'<tool_call>{"name": "\ud83d"}</tool_call>', []),
    (HermesParser, r'<tool_call>{"name": "a", "arguments": "\ud83d"}</tool_call>',
     r'<tool_call>{"name": "a", "arguments": "\ud83d"}</tool_call>', []),
    (MistralParser, r'[TOOL_CALLS][{"name": "\ud83d", "arguments": {}}]',
     r'[TOOL_CALLS][{"name": "\ud83d", "arguments": {}}]', []),
    (HermesParser, "<tool_call>no JSON</tool_call> more", "<tool_call>no JSON</tool_call> more", []),
    (HermesParser, '<tool_call>{"name": "a", "argu', '<tool_call>{"name": "a", "argu', []),
    (HermesParser, "so:\n<tool_call>x", "so:\n<tool_call>x", []),
    (HermesParser, "a < b\n <b>", "a < b\n <b>", []),
    (Llama3JsonParser, "just {text}", "just {text}", []),
    (Llama3JsonParser, '{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
    (Llama3JsonParser, '\n{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "",
     [("a", {}), ("b", {})]),
    (Llama3JsonParser, '<|python_tag|>{"name": "a", "parameters": {}}', "", [("a", {})]),
    (Llama3JsonParser, '{"name": "a", "parameters": {}}; {"x": 1} more', '; {"x": 1} more', [("a", {})]),
    (Llama3JsonParser, '{"name": "a", "parameters": {}}\nI called a. {"name": "b", "parameters": {}}',
     '\nI called a. {"name": "b", "parameters": {}}', [("a", {})]),
    (Llama3JsonParser, '{"name": "a", "parameters": {}} ;\n<|python_tag|> ', "", [("a", {})]),
    (Llama3JsonParser, '{"name": "a", "parameters": {}} <|pyth', " <|pyth", [("a", {})]),
    (Llama3JsonParser, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (Llama3JsonParser, '{"answer": 42} ', '{"answer": 42} ', []),
    (Llama3JsonParser, '{"name": "a", "parameters": {"x"', '{"name": "a", "parameters": {"x"', []),
    (Llama3JsonParser, "  ", "  ", []),
    (LISTED, '{"name": "a", "parameters": {}}; {"name": "b"}', "", [("a", {}), ("b", {})]),
    (LISTED, '{"name": "John"}', '{"name": "John"}', []),
    (LISTED, ' {"name": "John", "parameters": {}}.', ' {"name": "John", "parameters": {}}.', []),
    (LISTED, '{"name": "c", "parameters": {"x": "<|python_tag|>"}}',
     '{"name": "c", "parameters": {"x": "<|python_tag|>"}}', []),
    (LISTED, '{"name": "a", "parameters": {}}\n{"name": "c"}', '\n{"name": "c"}', [("a", {})]),
    (LISTED, '<|python_tag|>{"name": "c", "parameters": {}}', "", [("c", {})]),
    (MistralParser, "text [TOOL", "text [TOOL", []),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "arguments": {"x": [1]}}]', "", [("a", {"x": [1]})]),
    (MistralParser, 'Hm. [TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
     "Hm.", [("a", {}), ("b", {})]),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "arguments": {}}]\n\nDone. ', "\n\nDone. ", [("a", {})]),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"x": 1}].', ', {"x": 1}].', [("a", {})]),
    (MistralParser, '[TOOL_CALLS][{"name": "a", "arguments": {}}] or [TOOL_CALLS][{"name": "b"}] \n', " or",
     [("a", {}), ("b", {})]),
    (MistralParser, "[TOOL_CALLS]none", "[TOOL_CALLS]none", []),
    (BEGUN, '[{"name": "a", "arguments": {"x": "]"}}]', "", [("a", {"x": "]"})]),
    (MistralParser, "so: [TOOL_CALLS]none", "so: [TOOL_CALLS]none", []),
    (BEGUN, "none", "none", []),
    (ARGS, 'Hm. [TOOL_CALLS]a[ARGS]{"x": [1]}[TOOL_CALLS]b[ARGS]{} \n', "Hm.",
     [("a", {"x": [1]}), ("b", {})]),
    (ARGS, '[TOOL_CALLS]a[CALL_ID]123456789[ARGS] {"x": "}"}', "", [("a", {"x": "}"})]),
    (ARGS, "[TOOL_CALLS]none", "[TOOL_CALLS]none", []),
    (ARGS, "[TOOL_CALLS]a[ARGS]{1}.", "[TOOL_CALLS]a[ARGS]{1}.", []),
    (ARGS, '[TOOL_CALLS]a[ARGS]{"x', '[TOOL_CALLS]a[ARGS]{"x', []),
    (ARGS, "[TOOL_CALLS]a[ARGS]{} Done.", " Done.", [("a", {})]),
    (ARGS_BEGUN, "a[ARGS]{}", "", [("a", {})]),
    (ARGS_BEGUN, "none", "none", []),
    (DEEPSEEK, "Hm.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     '<｜tool▁call▁begin｜>b<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "Hm.",
     [("a", {}), ("b", {"x": 1})]),
    (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", [("a", {}), ("b", {})]),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", []),
    (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>Done.", "Done.", [("a", {})]),
    (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁s",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁s", []),
    (CODER, CODER_CALL, "", [("a", {"x": "1"})]),
    (CODER, f"Hm.\n\n{CODER_CALL}\n{CODER_CALL}", "Hm.", [("a", {"x": "1"})] * 2),
    (CODER, "<tool_call><function=a></function></tool_call>", "", [("a", {})]),
    (CODER, CODER_CALL.replace("1", "<a>\n</tool_call>"),
     "", [("a", {"x": "<a>\n</tool_call>"})]),
    (CODER, "<tool_call>\n<function=a>\n</function>", "", [("a", {})]),
    (CODER, "<tool_call>\n<function=a>\n<parameter=x>", "<tool_call>\n<function=a>\n<parameter=x>", []),
    (CODER, '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    (GLM, GLM_CALL, "", [("a", {"x": "1", "y": " two\n"})]),
    (GLM, f"{GLM_CALL}\n<tool_call>b</tool_call>.", ".", [("a", {"x": "1", "y": " two\n"}), ("b", {})]),
    (GLM, "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", "", [("a", {"x": "1"})]),
    (GLM, "<tool_call>a b</tool_call>", "<tool_call>a b</tool_call>", []),
    (GLM, "<tool_call>a\n<arg_key>x", "<tool_call>a\n<arg_key>x", []),
    (HarmonyCallParser, HARMONY_CALL, "", [("a", {"x": 1})]),
    (HarmonyCallParser, f"<|channel|>analysis<|message|>Hm < x.<|end|><|start|>assistant{HARMONY_CALL}",
     "Hm < x.", [("a", {"x": 1})]),
    (HarmonyCallParser, "So <|start|>assistant to=functions.a<|channel|>commentary<|message|>{}<|call|>",
     "So ", [("a", {})]),
    (HarmonyCallParser, "<|channel|>final<|message|>Yes<|return|>", "Yes", []),
    (HarmonyCallParser, "<|channel|>commentary to=functions.a<|message|>none<|end|>",
     "<|channel|>commentary to=functions.a<|message|>none", []),
    (HarmonyCallParser, "a <|chan", "a <|chan", []),
    (HarmonyCallParser, "<|channel|>comm", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "output", "text", "calls"), CASES)
def test_parser_reads_one_piece_and_single_characters_alike(
    make: Make, output: str, text: str, calls: list[Call]
) -> None:
    assert read(make, [output]) == (text, calls)
    assert read(make, list(output)) == (text, calls)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_parser_is_independent_of_the_pieces(
    case: tuple[Make, str, str, list[Call]], cuts: list[int]
) -> None:
    make, output, text, calls = case
    bounds = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    assert read(make, [output[a:b] for a, b in pairwise(bounds)]) == (text, calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1e999}',
        '{"x":12345678901234567890.10000000000000000001 , "x": [ 1 ]}',
        r'{"x": "\u00e9\/é \" } \\"}',
        r'{"half": "\ud83d", "\ude00": 1}',
        '{"arguments": {"name": "b"}, "parameters": {}}',
        "{\n }",
    ],
)
@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (HermesParser, '<tool_call>\n { "arguments" :\t', ' , "name": "a"}\n</tool_call>'),
        (
            HermesParser,
            '<tool_call>{"name": "b", "arguments": {}, "arguments": ',
            ', "name": "a"}</tool_call>',
        ),
        (Llama3JsonParser, '{"name": "a", "parameters": ', "}"),
        (MistralParser, '[TOOL_CALLS][{"n\\u0061me": "a", "id": "{\\"", "arguments": ', ', "x": 1}]'),
    ],
)
def test_parser_keeps_arguments_as_written(make: Make, before: str, after: str, arguments: str) -> None:
    output = before + arguments + after
    for pieces in ([output], list(output)):
        parser, result = make(), Parsed()
        for piece in pieces:
            result += parser.push(piece)
        result += parser.finish()
        assert result.text == ""
        assert [(call.name, call.arguments_json) for call in result.calls] == [("a", arguments)]


MARKUP = {
    HermesParser: ["<tool_call>", "</tool_call>", "<tool", "<"],
    MistralParser: ["[TOOL_CALLS]", "[TOOL", "[", "]"],
    BEGUN: ["[TOOL_CALLS]", "[TOOL", "[", "]"],
    Llama3JsonParser: ["<|python_tag|>", "<|python", "<", ";"],
    LISTED: ["<|python_tag|>", "<|python", "<", ";", '{"name": "a"}'],
}
COMMON = ['{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {}}', '{"x": "}"}', "{", "}", ", "]


@pytest.mark.parametrize("make", MARKUP)
@given(data=st.data())
def test_parser_is_independent_of_the_pieces_for_arbitrary_text(make: Make, data: st.DataObject) -> None:
    bits = st.sampled_from([*MARKUP[make], *COMMON, " ", "\n", " hi "])
    output = "".join(data.draw(st.lists(bits, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=8))
    bounds = [0, *sorted(cuts), len(output)]
    whole = read(make, [output])
    assert read(make, [output[a:b] for a, b in pairwise(bounds)]) == whole
    assert read(make, list(output)) == whole
    assert output.count("hi") == whole[0].count("hi")


@pytest.mark.parametrize("make", MARKUP)
@given(data=st.data())
def test_first_call_parser_ends_with_the_last_character_of_the_call(make: Make, data: st.DataObject) -> None:
    bits = st.sampled_from([*MARKUP[make], *COMMON, " ", "\n", " hi ", "f", '{"x": [1]}'])
    output = "".join(data.draw(st.lists(bits, max_size=10)))
    cut = data.draw(st.integers(0, len(output)))
    parser, by_letter = make(), Parsed()
    for letter in output:
        by_letter += parser.push(letter)
        if by_letter.calls:
            break
    else:
        by_letter += parser.finish()
    expected = by_letter.text, [(call.name, json.loads(call.arguments_json)) for call in by_letter.calls]
    for pieces in ([output], [output[:cut], output[cut:]], list(output)):
        assert read(lambda: FirstCall(make()), pieces) == expected


@pytest.mark.parametrize("make", [HermesParser, Llama3JsonParser, LISTED, MistralParser, BEGUN])
@given(output=st.text(alphabet='<>tool_ca{}[]"nme:argu \\/|TOLCALS,', max_size=60))
def test_parser_loses_no_text_without_calls(make: Make, output: str) -> None:
    text, calls = read(make, list(output))
    if not calls:
        assert text == output


def test_parser_returns_text_at_once() -> None:
    parser = HermesParser()
    assert parser.push("One moment") == Parsed("One moment")
    assert parser.push(" <b>") == Parsed(" <b>")
    assert parser.push(" <tool") == Parsed("")
    assert parser.push("s>") == Parsed(" <tools>")


def test_parser_returns_a_call_with_its_last_character() -> None:
    for make, output in [
        (HermesParser, A),
        (Llama3JsonParser, '{"name": "a", "parameters": {}}'),
        (MistralParser, '[TOOL_CALLS][{"name": "a", "arguments": {}}'),
    ]:
        parser = make()
        assert not parser.push(output[:-1]).calls
        assert len(parser.push(output[-1]).calls) == 1
