"""Tensors of the protocol as plain lists: typed or raw contents, both ways.

Source: the Open Inference Protocol v2, "Tensor Data Types" and "Raw Tensor Contents".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import InvalidParameter, UnsupportedFeature, printable
from gateway import limits

# Bounds of the loops below: no tokens of other requests move while one is read.
MAX_INPUTS: Final = 64  # the prompt, and parameters as tensors
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = limits.MAX_JSON_IDS  # of numbers: token ids
MAX_TEXTS: Final = limits.MAX_JSON_LIST  # of a BYTES tensor

_TYPED: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_RAW: Final = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}

Element = bool | int | float | bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """Input of a request; ``path`` is its place there, with its name: "inputs[text_input]"."""

    path: str
    datatype: str
    values: Sequence[Element]


def read_inputs(request: oip.ModelInferRequest) -> dict[str, Tensor]:
    """Return all inputs of a request by name. Raises InvalidParameter with the path of the fault."""
    raw = request.raw_input_contents
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidParameter("inputs", f"must have at most {MAX_INPUTS} elements")
    if raw and len(raw) != len(request.inputs):
        raise InvalidParameter("raw_input_contents", "must have one entry for each input")
    found: dict[str, Tensor] = {}
    for index, tensor in enumerate(request.inputs):
        path = f"inputs[{printable(tensor.name) or index}]"
        if tensor.name in found:
            raise InvalidParameter(path, "is given twice")
        refuse_parameters(path, tensor)
        found[tensor.name] = _read(tensor, path, raw[index] if raw else None)
    return found


def refuse_parameters(
    path: str,
    tensor: oip.ModelInferRequest.InferInputTensor | oip.ModelInferRequest.InferRequestedOutputTensor,
) -> None:
    """Raise UnsupportedFeature for a tensor in shared memory, or with any other parameter."""
    for name in tensor.parameters:
        raise UnsupportedFeature(f"{path}.parameters[{printable(name)}]")


def _read(tensor: oip.ModelInferRequest.InferInputTensor, path: str, raw: bytes | None) -> Tensor:
    if tensor.datatype not in _TYPED:
        raise InvalidParameter(f"{path}.datatype", f"must be one of {', '.join(_TYPED)}")
    count = _elements(tensor, path)
    if raw is None:
        contents = getattr(tensor.contents, _TYPED[tensor.datatype])
        if len(contents) != count:
            raise InvalidParameter(f"{path}.contents", f"must have {count} elements of {tensor.datatype}")
        values: Sequence[Element] = list(contents)
    elif tensor.contents.ByteSize():
        raise InvalidParameter(f"{path}.contents", "must be empty where there are raw contents")
    else:
        values = _from_raw(raw, tensor.datatype, count, path)
    return Tensor(path, tensor.datatype, values)


def _elements(tensor: oip.ModelInferRequest.InferInputTensor, path: str) -> int:
    """Return the number of elements by the shape. Raises InvalidParameter."""
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise InvalidParameter(f"{path}.shape", f"must have at most {MAX_DIMENSIONS} dimensions")
    most = MAX_TEXTS if tensor.datatype == "BYTES" else MAX_ELEMENTS
    count = 1
    for size in tensor.shape:
        count *= size
        if size < 0 or count > most:
            raise InvalidParameter(f"{path}.shape", f"must have from 0 to {most} elements")
    return count


def _from_raw(raw: bytes, datatype: str, count: int, path: str) -> Sequence[Element]:
    wrong = InvalidParameter(f"{path}.shape", "does not fit its raw contents")
    if datatype != "BYTES":
        layout = struct.Struct(f"<{count}{_RAW[datatype]}")
        if layout.size != len(raw):
            raise wrong
        return layout.unpack(raw)
    values: list[bytes] = []
    at = 0
    while at < len(raw) and len(values) < count:
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw):
            raise wrong
        values.append(raw[at + 4 : end])
        at = end
    if at != len(raw) or len(values) != count:
        raise wrong
    return values


def add_output(
    response: oip.ModelInferResponse, name: str, datatype: str, values: Sequence[Element], *, raw: bool
) -> None:
    """Append a tensor of one dimension."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if raw:
        response.raw_output_contents.append(_to_raw(datatype, values))
    else:
        getattr(tensor.contents, _TYPED[datatype]).extend(values)


def _to_raw(datatype: str, values: Sequence[Element]) -> bytes:
    if datatype != "BYTES":
        return struct.pack(f"<{len(values)}{_RAW[datatype]}", *values)
    return b"".join(struct.pack("<I", len(v)) + v for v in values if isinstance(v, bytes))


def contents_field(datatype: str) -> str | None:
    """Return the field of typed contents that has elements of a type; None: there is no such type."""
    return _TYPED.get(datatype)


def text_of(datatype: str, contents: oip.InferTensorContents) -> list[Any]:
    """Return typed contents as JSON has them: numbers, truth values, and texts in UTF-8."""
    values = list(getattr(contents, _TYPED[datatype]))
    return [one.decode("utf-8", "replace") for one in values] if datatype == "BYTES" else values
