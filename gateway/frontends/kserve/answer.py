"""``pb.GenerateResponse`` → ``ModelInferResponse``.

Tensors have one dimension. ``text_output`` and ``finish_reason`` ("" while it goes on) have one element for
each choice of the response, ``token_ids`` the ids of one choice, so that a response with several choices has
none. A streamed response is about one choice, the parameter ``index``; the last one of a request has
``triton_final_response`` and the usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.kserve.request import VERSION, InferGenerateRequest
from gateway.frontends.kserve.tensors import add_output

_REASONS: Final = {
    pb.FINISH_REASON_UNSPECIFIED: b"",
    pb.FINISH_REASON_STOP: b"stop",
    pb.FINISH_REASON_LENGTH: b"length",
    pb.FINISH_REASON_TIME_LIMIT: b"time_limit",
    pb.FINISH_REASON_CANCELLED: b"cancelled",
    pb.FINISH_REASON_TOOL_CALLS: b"tool_calls",
    pb.FINISH_REASON_REPETITION: b"repetition",
}


def whole(message: pb.GenerateResponse, asked: InferGenerateRequest) -> oip.ModelInferResponse:
    """Return all choices in one response."""
    response = _response(message.outputs, asked, message.request_id)
    _add_usage(response, message)
    return response


def pieces(
    message: pb.GenerateResponse, asked: InferGenerateRequest, request_id: str
) -> Iterator[oip.ModelInferResponse]:
    """Yield a response for each choice with new output."""
    last = len(message.outputs) - 1
    for position, output in enumerate(message.outputs):
        response = _response([output], asked, request_id)
        response.parameters["index"].int64_param = output.index
        final = position == last and message.HasField("usage")
        response.parameters["triton_final_response"].bool_param = final
        if final:
            _add_usage(response, message)
        yield response


def _response(
    outputs: Sequence[pb.OutputDelta], asked: InferGenerateRequest, request_id: str
) -> oip.ModelInferResponse:
    response = oip.ModelInferResponse(model_name=asked.request.model, model_version=VERSION, id=request_id)
    if "text_output" in asked.outputs:
        add_output(response, "text_output", "BYTES", [o.text.encode() for o in outputs], raw=asked.raw)
    if "token_ids" in asked.outputs and len(outputs) == 1:
        add_output(response, "token_ids", "INT64", list(outputs[0].token_ids), raw=asked.raw)
    if "finish_reason" in asked.outputs:
        reasons = [_REASONS[output.finish_reason] for output in outputs]
        add_output(response, "finish_reason", "BYTES", reasons, raw=asked.raw)
    return response


def _add_usage(response: oip.ModelInferResponse, message: pb.GenerateResponse) -> None:
    usage = message.usage
    for name, count in (
        ("prompt_tokens", usage.prompt_tokens),
        ("completion_tokens", usage.completion_tokens),
        ("cached_prompt_tokens", usage.cached_prompt_tokens),
    ):
        response.parameters[name].int64_param = count
