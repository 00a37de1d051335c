"""``pb.GenerateResponse`` → the protocol's responses."""

from __future__ import annotations

import struct

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.kserve import answer
from gateway.frontends.kserve.request import InferGenerateRequest, read_request
from tests.gateway.frontends.kserve.tensors import MODEL, asking, asking_raw, outputs, raw_texts

USAGE = pb.Usage(prompt_tokens=4, completion_tokens=3, total_tokens=7, cached_prompt_tokens=2)


def asked(*names: str, raw: bool = False) -> InferGenerateRequest:
    request = asking_raw(("text_input", "BYTES", [1], raw_texts(b"x"))) if raw else asking()
    for name in names:
        request.outputs.add(name=name)
    return read_request(request, streaming=True)


def message(*deltas: pb.OutputDelta, last: bool = False) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", outputs=deltas, usage=USAGE if last else None)


def delta(index: int, text: str, *ids: int, reason: str = "UNSPECIFIED") -> pb.OutputDelta:
    said = pb.FinishReason.Value(f"FINISH_REASON_{reason}")
    return pb.OutputDelta(index=index, text=text, token_ids=ids, finish_reason=said)


def parameters(response: oip.ModelInferResponse) -> dict[str, object]:
    kinds = {name: value.WhichOneof("parameter_choice") for name, value in response.parameters.items()}
    return {name: getattr(response.parameters[name], kind or "") for name, kind in kinds.items()}


def test_whole_answer_has_all_choices() -> None:
    response = answer.whole(message(delta(0, "hé", 5, 6, reason="STOP"), last=True), asked())
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "r")
    assert outputs(response) == {
        "text_output": ["hé".encode()],
        "token_ids": [5, 6],
        "finish_reason": [b"stop"],
    }
    assert parameters(response) == {"prompt_tokens": 4, "completion_tokens": 3, "cached_prompt_tokens": 2}


def test_several_choices_have_no_common_token_ids() -> None:
    both = message(delta(0, "a", 5, reason="LENGTH"), delta(1, "b", 6, 7, reason="TIME_LIMIT"), last=True)
    response = answer.whole(both, asked())
    assert outputs(response) == {"text_output": [b"a", b"b"], "finish_reason": [b"length", b"time_limit"]}


def test_pieces_are_about_one_choice_each_and_only_the_last_is_final() -> None:
    messages = [
        message(delta(0, "a", 5), delta(1, "b", 6)),
        message(delta(0, "c", 7, reason="LENGTH"), delta(1, "", reason="CANCELLED"), last=True),
    ]
    responses = [piece for m in messages for piece in answer.pieces(m, asked(), "mine")]
    assert [response.id for response in responses] == ["mine"] * 4
    assert [response.parameters["index"].int64_param for response in responses] == [0, 1, 0, 1]
    final = [response.parameters["triton_final_response"].bool_param for response in responses]
    assert final == [False, False, False, True]
    assert [outputs(response)["finish_reason"] for response in responses] == [
        [b""],
        [b""],
        [b"length"],
        [b"cancelled"],
    ]
    assert outputs(responses[2])["token_ids"] == [7]
    assert outputs(responses[3])["token_ids"] == []
    assert "prompt_tokens" not in responses[2].parameters
    assert responses[3].parameters["prompt_tokens"].int64_param == 4


def test_every_reason_has_a_name() -> None:
    for reason in pb.FinishReason.keys():  # noqa: SIM118
        response = answer.whole(message(delta(0, "", reason=reason.removeprefix("FINISH_REASON_"))), asked())
        (name,) = outputs(response)["finish_reason"]
        assert name == reason.removeprefix("FINISH_REASON_").removeprefix("UNSPECIFIED").lower().encode()


def test_only_the_tensors_that_were_asked_for() -> None:
    response = answer.whole(message(delta(0, "a", 5)), asked("token_ids"))
    assert outputs(response) == {"token_ids": [5]}


def test_raw_contents_for_raw_contents() -> None:
    response = answer.whole(message(delta(0, "ab", 5, 6, reason="STOP")), asked(raw=True))
    assert [tensor.name for tensor in response.outputs] == ["text_output", "token_ids", "finish_reason"]
    raw = [raw_texts(b"ab"), struct.pack("<qq", 5, 6), raw_texts(b"stop")]
    assert list(response.raw_output_contents) == raw
