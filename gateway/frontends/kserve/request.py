"""A ``ModelInferRequest`` → ``pb.GenerateRequest`` and how the answer is wanted. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import (
    DiptychError,
    FieldViolation,
    InvalidParameter,
    UnknownModel,
    UnsupportedFeature,
)
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.kserve.images import IMAGE, put_turn
from gateway.frontends.kserve.parameters import boolean, gather, one_text, put_all, unquoted
from gateway.frontends.kserve.tensors import Tensor, read_inputs, refuse_parameters
from gateway.request.json_values import integer, token_ids

VERSION: Final = "1"
OUTPUTS: Final = {"text_output": "BYTES", "token_ids": "INT64", "finish_reason": "BYTES"}
_PROMPTS: Final = ("text_input", "token_ids", "input_ids")
_TIMEOUT_US: Final = (0, limits.MAX_TIMEOUT_MS * 1000)  # Triton: microseconds, 0 is none
_PATHS: Final = {"model": "model_name", "request_id": "id"}


@dataclass(frozen=True, slots=True)
class InferGenerateRequest:
    """Request of the core, and the form of its answer.

    Args:
        request: for the core.
        stream: one response for each piece; without it one for the whole.
        outputs: the tensors to send.
        timeout_s: from the arrival; None without one.
        raw: send them as raw contents, as the inputs came.
        names: path of the core's field → path in the client's message.
    """

    request: pb.GenerateRequest
    stream: bool
    outputs: frozenset[str]
    timeout_s: float | None
    raw: bool
    names: dict[str, str]


def read_request(message: oip.ModelInferRequest, *, streaming: bool) -> InferGenerateRequest:
    """Build the request. Raises DiptychError that names the client's field.

    Args:
        message: as it came.
        streaming: whether the RPC can carry pieces.
    """
    check_version(message.model_name, message.model_version)
    inputs = read_inputs(message)
    request = pb.GenerateRequest(model=message.model_name, request_id=message.id)
    prompts = [inputs.pop(name) for name in _PROMPTS if name in inputs]
    if len(prompts) != 1:
        raise InvalidParameter("inputs", f"must have exactly one of {', '.join(_PROMPTS)}")
    (prompt,) = prompts
    images = inputs.pop(IMAGE, None)
    if images is None:
        placed = _put_prompt(request, prompt)
    else:
        placed = put_turn(request, prompt, images)
    found = gather(message, inputs)
    path, value = found.pop("stream", ("", streaming))
    stream = boolean(path, value)
    if stream and not streaming:
        raise UnsupportedFeature(path, "needs ModelStreamInfer")
    path, value = found.pop("timeout", ("", 0))
    timeout_us = integer(path, unquoted(value), _TIMEOUT_US)
    if "exclude_input_in_output" in found:
        path, value = found.pop("exclude_input_in_output")
        if not boolean(path, value):
            raise UnsupportedFeature(path, "the prompt is not repeated in the output")
    names = {**placed, **_PATHS, **put_all(request, found)}
    outputs = _outputs(message)
    request.response.timings = False
    request.response.text = "text_output" in outputs
    request.response.token_ids = "token_ids" in outputs
    raw = bool(message.raw_input_contents)
    return InferGenerateRequest(request, stream, outputs, timeout_us / 1e6 or None, raw, names)


def check_version(name: str, version: str) -> None:
    """Raise UnknownModel for any version but the one that there is."""
    if version not in ("", VERSION):
        raise UnknownModel(name)


def with_client_field(error: DiptychError, names: dict[str, str]) -> DiptychError:
    """Return the error with the field as the client wrote it."""
    if not error.violations:
        return error
    field, description = error.violations[0].field, error.violations[0].description
    around = (path for known, path in names.items() if f"{field}.".startswith((f"{known}.", f"{known}[")))
    if (path := next(around, None)) is None:
        return error
    if isinstance(error, InvalidParameter | UnsupportedFeature):  # whose message has the field too
        return type(error)(path, description)
    error.violations = (FieldViolation(path, description),)
    return error


def _put_prompt(request: pb.GenerateRequest, tensor: Tensor) -> dict[str, str]:
    """Set the prompt. Returns path of the core's field → path in the client's message."""
    if tensor.datatype == "BYTES":
        request.text = one_text(tensor)
    elif tensor.datatype in ("INT32", "INT64", "UINT32", "UINT64"):
        request.token_ids.ids.extend(token_ids(tensor.path, tensor.values))
    else:
        raise InvalidParameter(f"{tensor.path}.datatype", "must be BYTES, INT32, INT64, UINT32 or UINT64")
    return {"text": tensor.path, "token_ids.ids": tensor.path}


def _outputs(message: oip.ModelInferRequest) -> frozenset[str]:
    if len(message.outputs) > len(OUTPUTS):
        raise InvalidParameter("outputs", f"must have at most {len(OUTPUTS)} elements")
    for index, output in enumerate(message.outputs):
        refuse_parameters(f"outputs[{index}]", output)
        if output.name not in OUTPUTS:
            raise InvalidParameter(f"outputs[{index}].name", f"must be one of {', '.join(OUTPUTS)}")
    return frozenset(output.name for output in message.outputs) or frozenset(OUTPUTS)
