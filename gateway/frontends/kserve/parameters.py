"""Parameters of a request, by name: of the protocol's ``parameters``, of the JSON in the input
``sampling_parameters`` (as for Triton's vLLM backend), or each an input tensor of one element (as for
TensorRT-LLM's). A name may come one way only.

A number or a truth value may be written as a string: that is how clients of Triton's vLLM backend send them,
and the protocol's own parameters had no floating point at first. Only types are checked here; ranges are the
core's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.parameters import PARAMETERS, Parameter, Texts, TokenIds
from diptych.runtime.errors import InvalidParameter, printable
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.kserve.tensors import Tensor
from gateway.request.json_values import array, integer, number, parse_body, string, token_ids

_IGNORED: Final = frozenset(
    {"triton_enable_empty_final_response", "sequence_id", "sequence_start", "sequence_end"}
)

_TRUTH: Final[Mapping[str, bool]] = {"true": True, "True": True, "false": False, "False": False}
_NUMBER: Final = re.compile(r"[+-]?\d{1,32}(\.\d{0,32})?([eE][+-]?\d{1,3})?", re.ASCII)
MAX_PARAMETERS: Final = 64


def gather(request: oip.ModelInferRequest, inputs: Mapping[str, Tensor]) -> dict[str, tuple[str, object]]:
    """Return name → (path, value), from all three places."""
    if len(request.parameters) > MAX_PARAMETERS:
        raise InvalidParameter("parameters", f"must have at most {MAX_PARAMETERS} elements")
    found: dict[str, tuple[str, object]] = {}

    def add(name: str, path: str, value: object) -> None:
        if name in found:
            raise InvalidParameter(printable(path), "is given twice")
        found[name] = (printable(path), value)

    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            add(name, f"parameters[{name}]", getattr(parameter, kind))
    for name, tensor in inputs.items():
        if name != "sampling_parameters":
            add(name, tensor.path, _scalar(name, tensor))
            continue
        for member, value in _json(tensor).items():
            if value is not None:
                add(member, f"sampling_parameters.{member}", value)
    return found


def put_all(request: pb.GenerateRequest, found: Mapping[str, tuple[str, object]]) -> dict[str, str]:
    """Set every parameter. Return path of the core's field → path in the client's message, for errors."""
    names: dict[str, str] = {}
    for name, (path, value) in found.items():
        if name in _IGNORED:
            continue
        if (parameter := KNOWN.get(name)) is None:
            raise InvalidParameter(path, "is not a parameter that this server knows")
        parameter.put(request, _READERS[parameter.type](path, value, parameter))
        names[parameter.wire] = path
    return names


def one_text(tensor: Tensor) -> str:
    """Return the one string of a BYTES tensor. Raises InvalidParameter."""
    if tensor.datatype != "BYTES" or len(tensor.values) != 1:
        raise InvalidParameter(tensor.path, "must be a BYTES tensor of one element")
    value = tensor.values[0]
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else ""
    except UnicodeDecodeError as error:
        raise InvalidParameter(tensor.path, "must be UTF-8") from error


def _json(tensor: Tensor) -> dict[str, object]:
    try:
        return parse_body(one_text(tensor).encode())
    except InvalidParameter as error:
        raise InvalidParameter(tensor.path, error.violations[0].description) from error


def _scalar(name: str, tensor: Tensor) -> object:
    """Return a parameter that came as a tensor; `stop` may have several strings, ids several numbers."""
    if tensor.datatype == "BYTES":
        texts = [one_text(Tensor(tensor.path, "BYTES", (value,))) for value in tensor.values]
        return texts[0] if len(texts) == 1 else texts
    if name in KNOWN and KNOWN[name].type is TokenIds:
        return list(tensor.values)
    if len(tensor.values) != 1:
        raise InvalidParameter(tensor.path, "must have one element")
    return tensor.values[0]


def boolean(path: str, value: object) -> bool:
    """Return a truth value. Raises InvalidParameter."""
    value = _TRUTH.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise InvalidParameter(path, "must be true or false")
    return value


def unquoted(value: object) -> object:
    """Return the number that a string spells, or the value as it is."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    return float(value) if set(value) & set(".eE") else int(value)


def _texts(path: str, value: object, parameter: Parameter) -> list[str]:
    texts = array(path, value if isinstance(value, list) else [value], limits.MAX_JSON_LIST)
    return [string(path, text) for text in texts]


def _ids(path: str, value: object, parameter: Parameter) -> Sequence[int]:
    most = max(parameter.most, limits.MAX_JSON_LIST)
    return token_ids(path, array(path, value, most))


def _integer(path: str, value: object, parameter: Parameter) -> int:
    if parameter.inverted:  # Triton: the lower number comes first, and 0 is the first
        return -integer(path, unquoted(value), (0, parameter.fits[1]))
    return integer(path, unquoted(value), parameter.integers)


_READERS: Final[Mapping[object, Callable[[str, object, Parameter], Any]]] = {
    float: lambda path, value, _: number(path, unquoted(value)),
    int: _integer,
    bool: lambda path, value, _: boolean(path, value),
    str: lambda path, value, _: string(path, value),
    Texts: _texts,
    TokenIds: _ids,
}
KNOWN: Final = {row.spelling.kserve: row for row in PARAMETERS.values() if row.spelling.kserve}
