"""Requests as clients of the protocol send them, and their answers' tensors as plain lists."""

from __future__ import annotations

import struct
from typing import Any

from diptych.kserve.v2 import open_inference_pb2 as oip

MODEL = "SmolLM2-135M-Instruct"
_FIELDS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def asking(
    text: str | None = "Count:",
    *,
    id: str = "",
    inputs: dict[str, tuple[str, list[Any]]] | None = None,
    **knobs: Any,
) -> oip.ModelInferRequest:
    """``inputs``: name → (datatype, elements), typed; ``knobs``: the request's parameters."""
    request = oip.ModelInferRequest(model_name=MODEL, id=id)
    if text is not None:
        add(request, "text_input", "BYTES", [text.encode()])
    for name, (datatype, values) in (inputs or {}).items():
        add(request, name, datatype, values)
    for name, value in knobs.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[
            type(value)
        ]
        setattr(request.parameters[name], kind, value)
    return request


def add(request: oip.ModelInferRequest, name: str, datatype: str, values: list[Any]) -> None:
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, _FIELDS[datatype]).extend(values)


def asking_raw(*inputs: tuple[str, str, list[int], bytes]) -> oip.ModelInferRequest:
    """Each: name, datatype, shape, little-endian bytes."""
    request = oip.ModelInferRequest(model_name=MODEL)
    for name, datatype, shape, data in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


def raw_texts(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def outputs(response: oip.ModelInferResponse) -> dict[str, list[Any]]:
    """The tensors of an answer with typed contents."""
    found = {}
    for tensor in response.outputs:
        found[tensor.name] = list(getattr(tensor.contents, _FIELDS[tensor.datatype]))
        assert list(tensor.shape) == [len(found[tensor.name])]
    return found


def text(responses: list[oip.ModelInferResponse]) -> str:
    return b"".join(piece for r in responses for piece in outputs(r).get("text_output", [])).decode()
