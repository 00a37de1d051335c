"""The server's messages → results."""

from __future__ import annotations

from diptych.client import Choice, Model, ToolCall
from diptych.client.completion import Received, read_chunk, read_completion, read_models, read_tokens
from diptych.v1 import inference_pb2 as pb


def test_all_choices_with_all_that_is_told_of_them() -> None:
    second = pb.OutputDelta(index=1, text="b", finish_reason=pb.FINISH_REASON_STOP, stop_text=".")
    score = second.logprobs.add(token_id=5, logprob=-0.5, rank=1, text="b")
    score.top.add(token_id=6, logprob=-1.0, rank=2, utf8=b"\xf0")
    call = pb.ToolCall(id="c", name="weather", arguments_json='{"city": "Paris"}')
    first = pb.OutputDelta(index=0, finish_reason=pb.FINISH_REASON_TOOL_CALLS, tool_calls=[call])
    prompt = pb.PromptInfo(token_count=2, cached_token_count=1, token_ids=[3, 4])
    prompt.logprobs.add(token_id=3)
    answer = read_completion(pb.GenerateResponse(request_id="r", outputs=[second, first], prompt=prompt))

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.first is answer.choices[0]
    assert answer.tool_calls == (ToolCall("c", "weather", '{"city": "Paris"}'),)
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")
    other = answer.choices[1]
    assert (other.text, other.finish_reason, other.stop_text, other.stop_token_id) == ("b", "stop", ".", None)
    [scored] = other.logprobs
    assert (scored.logprob, scored.rank, scored.text) == (-0.5, 1, "b")
    assert [(top.token_id, top.utf8) for top in scored.top] == [(6, b"\xf0")]
    assert answer.prompt is not None
    assert (answer.prompt.token_ids, answer.prompt.logprobs[0].logprob) == ((3, 4), None)


def test_pieces_of_several_choices_come_together() -> None:
    received = Received()
    for outputs in (
        [pb.OutputDelta(index=1, text="x", token_ids=[1])],
        [pb.OutputDelta(index=0, text="a"), pb.OutputDelta(index=1, text="y", token_ids=[2])],
        [pb.OutputDelta(index=1, finish_reason=pb.FINISH_REASON_LENGTH)],
        [pb.OutputDelta(index=0, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0)],
    ):
        received.add(read_chunk(pb.GenerateResponse(outputs=outputs)))
    assert received.completion().choices == (
        Choice(0, "a", finish_reason="stop", stop_token_id=0),
        Choice(1, "xy", (1, 2), finish_reason="length"),
    )


def test_a_piece_without_choice_zero_has_no_text() -> None:
    chunk = read_chunk(pb.GenerateResponse(outputs=[pb.OutputDelta(index=2, text="other")]))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), None)


def test_a_reason_of_a_later_server_is_its_number() -> None:
    message = pb.GenerateResponse.FromString(
        pb.GenerateResponse(outputs=[pb.OutputDelta()]).SerializeToString()
    )
    message.outputs[0].ParseFromString(b"\x28\x63")  # finish_reason = 99
    assert read_chunk(message).finish_reason == "99"


def test_tokens_and_models() -> None:
    offset = pb.TokenizeResponse.Offset(start=1, end=2)
    found = read_tokens(pb.TokenizeResponse(token_ids=[7], tokens=["a"], offsets=[offset]))
    assert (found.ids, found.tokens, found.offsets) == ((7,), ("a",), ((1, 2),))
    capable = pb.Capabilities(max_n=128, structured_outputs=["regex"], chat=True)
    model = pb.Model(name="small", eos_token_ids=[2], vocab_size=9, capabilities=capable)
    assert read_models(pb.ListModelsResponse(models=[model])) == (
        Model("small", (), None, None, 9, (2,), 128, None, ("regex",), True, ""),
    )
