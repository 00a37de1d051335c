"""Tool calls in the output of a choice: streamed text, held-back text, markers and stops."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.detokenizer import Detokenizer
from gateway.output.output_stream import OutputStream
from gateway.output.stop_strings import StopStrings
from gateway.tools.hermes import HermesParser
from gateway.tools.llama3_json import Llama3JsonParser
from gateway.tools.mistral import MistralParser
from gateway.tools.parser import FirstCall, Parsed, ToolCallParser
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
MARK = "[TOOL_CALLS]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    theirs = byte_level()
    theirs.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("calls"), theirs))


def stream(
    tokenizer: Tokenizer,
    calls: ToolCallParser,
    *,
    stop: str = "",
    shown: frozenset[int] = frozenset(),
    one_call: bool = False,
) -> OutputStream:
    return OutputStream(
        Detokenizer(tokenizer, True, shown),
        StopStrings([stop], include=False) if stop else None,
        stop_ids=frozenset(),
        include_stop=False,
        min_tokens=0,
        interval=1,
        want_text=True,
        want_token_ids=False,
        calls=calls,
        one_call=one_call,
    )


def test_output_streams_text_before_a_complete_call(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, HermesParser())
    pieces = []
    for token_id in tokenizer.encode(f"Let me see. {CALL}"):
        output.push((token_id,))
        if output.due:
            pieces.append(output.take())
    assert "".join(piece.text for piece in pieces) == "Let me see."
    assert len(pieces) > 2, "nothing streamed"
    assert not any(piece.tool_calls for piece in pieces[:-1])
    ((call,),) = (pieces[-1].tool_calls,)
    assert (call.name, call.arguments_json) == ("f", '{"x": 1}')
    assert output.called


def test_output_returns_an_incomplete_call_as_text(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, HermesParser())
    output.push(tokenizer.encode("<tool_call>{"))
    assert output.take().text == ""
    output.finish()
    assert output.take().text == "<tool_call>{"
    assert not output.called


def test_stop_string_applies_before_call_parsing(tokenizer: Tokenizer) -> None:
    for stop, called in ((" then", True), ('"f"', False)):
        output = stream(tokenizer, HermesParser(), stop=stop)
        assert output.push(tokenizer.encode(f"{CALL} then {CALL}"))
        output.finish()
        assert output.called is called
        delta = output.take()
        assert len(delta.tool_calls) == called
        assert delta.text == ("" if called else '<tool_call>{"name": ')


@pytest.mark.parametrize(
    ("parser", "before", "call", "after"),
    [
        (HermesParser, "Let me see.", CALL, f" and {CALL}"),
        (MistralParser, "Let me see.", f'{MARK}[{{"name": "f", "arguments": {{"x": 1}}}}', f", {CALL}]"),
        (Llama3JsonParser, "", '{"name": "f", "parameters": {"x": 1}}', "; {}"),
    ],
)
def test_single_call_ends_the_output(
    tokenizer: Tokenizer, parser: type[ToolCallParser], before: str, call: str, after: str
) -> None:
    """End the output also where the call ends inside a token, and where text follows in the same push."""
    until_call = tokenizer.encode(before + call)
    ids = [*until_call, *tokenizer.encode(after)]
    assert stream(tokenizer, parser()).push(ids) is False
    output = stream(tokenizer, parser(), one_call=True)
    assert output.push(ids)
    assert output.over
    output.finish()
    assert output.billed == len(until_call)
    delta = output.take()
    assert [(one.name, one.arguments_json) for one in delta.tool_calls] == [("f", '{"x": 1}')]
    assert delta.text == before
    none = stream(tokenizer, parser(), one_call=True)
    assert not none.push(tokenizer.encode("{ is no call"))
    none.finish()
    assert none.take().text == "{ is no call"
    back = stream(tokenizer, parser(), one_call=True)
    assert back.restore(until_call)
    assert back.over
    assert not stream(tokenizer, parser(), one_call=True).restore(ids)


def test_text_after_a_single_call_is_dropped() -> None:
    parser = FirstCall(HermesParser())
    parsed = parser.push(f"a{CALL}b{CALL}")
    assert (parsed.text, len(parsed.calls)) == ("a", 1)
    assert parser.finish() == Parsed()


def test_call_marker_of_a_control_token_is_parsed(tokenizer: Tokenizer) -> None:
    mark = tokenizer.id_of(MARK)
    assert mark is not None
    ids = [mark, *tokenizer.encode('[{"name": "f", "arguments": {}}]')]
    for shown, called in ((frozenset({mark}), True), (frozenset[int](), False)):
        output = stream(tokenizer, MistralParser(), shown=shown)
        output.push(ids)
        output.finish()
        assert output.called is called
