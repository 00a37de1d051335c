"""The knobs of a request, by name: of the protocol's ``parameters``, of the JSON in the input
``sampling_parameters`` (as for Triton's vLLM backend), or each an input tensor of one element (as for
TensorRT-LLM's). A name may come one way only.

A number or a truth value may be written as a string: that is how clients of Triton's vLLM backend send them,
and the protocol's own parameters had no floating point at first. Only types are checked here; ranges are the
core's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import InvalidParameter, printable
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.kserve.tensors import Tensor
from gateway.request.json_body import parse_body
from gateway.request.json_members import (
    INT32,
    INT64,
    SAMPLING_NUMBERS,
    UINT32,
    array,
    integer,
    number,
    string,
    token_ids,
)

_IGNORED: Final = frozenset(
    {"triton_enable_empty_final_response", "sequence_id", "sequence_start", "sequence_end"}
)

_TRUTH: Final[Mapping[str, bool]] = {"true": True, "True": True, "false": False, "False": False}
_NUMBER: Final = re.compile(r"[+-]?\d{1,32}(\.\d{0,32})?([eE][+-]?\d{1,3})?", re.ASCII)
MAX_PARAMETERS: Final = 64

Put = Callable[[pb.GenerateRequest, str, Any], None]


def gather(request: oip.ModelInferRequest, inputs: Mapping[str, Tensor]) -> dict[str, tuple[str, object]]:
    """Name → (where it stands, value), from all three places."""
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
    """Set every knob. Returns path of the core's field → where the client wrote it, for errors."""
    names: dict[str, str] = {}
    for name, (path, value) in found.items():
        if name in _IGNORED:
            continue
        if name not in KNOBS:
            raise InvalidParameter(path, "is not a parameter that this server knows")
        field, put = KNOBS[name]
        put(request, path, value)
        names[field] = path
    return names


def one_text(tensor: Tensor) -> str:
    """The one string of a BYTES tensor."""
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
    """A knob that came as a tensor; `stop` may have several strings, ids several numbers."""
    if tensor.datatype == "BYTES":
        texts = [one_text(Tensor(tensor.path, "BYTES", (value,))) for value in tensor.values]
        return texts[0] if len(texts) == 1 else texts
    if name in ("stop_token_ids", "allowed_token_ids"):
        return list(tensor.values)
    if len(tensor.values) != 1:
        raise InvalidParameter(tensor.path, "must have one element")
    return tensor.values[0]


def _message(request: pb.GenerateRequest, group: str) -> Any:
    return getattr(request, group)


def _number(group: str, field: str) -> Put:
    return lambda request, path, value: setattr(
        _message(request, group), field, number(path, unquoted(value))
    )


def _count(group: str, field: str, bounds: tuple[int, int] = UINT32) -> Put:
    return lambda request, path, value: setattr(
        _message(request, group), field, integer(path, unquoted(value), bounds)
    )


def _flag(group: str, field: str, *, invert: bool = False) -> Put:
    return lambda request, path, value: setattr(
        _message(request, group), field, boolean(path, value) is not invert
    )


def boolean(path: str, value: object) -> bool:
    """Raises InvalidParameter for what is no truth value."""
    value = _TRUTH.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise InvalidParameter(path, "must be true or false")
    return value


def unquoted(value: object) -> object:
    """The number that a string spells, or the value as it is."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    return float(value) if set(value) & set(".eE") else int(value)


def _put_stop(request: pb.GenerateRequest, path: str, value: object) -> None:
    texts = array(path, value if isinstance(value, list) else [value], limits.MAX_JSON_LIST)
    request.stopping.stop.extend(string(path, text) for text in texts)


def _put_stop_ids(request: pb.GenerateRequest, path: str, value: object) -> None:
    request.stopping.stop_token_ids.extend(token_ids(path, array(path, value, limits.MAX_JSON_LIST)))


def _put_allowed(request: pb.GenerateRequest, path: str, value: object) -> None:
    request.sampling.allowed_token_ids.extend(token_ids(path, array(path, value, limits.MAX_JSON_IDS)))


def _put_priority(request: pb.GenerateRequest, path: str, value: object) -> None:
    request.priority = -integer(path, unquoted(value), (0, INT32[1]))  # Triton: the lower number comes first


def _put_salt(request: pb.GenerateRequest, path: str, value: object) -> None:
    request.cache.salt = string(path, value)


KNOBS: Final[Mapping[str, tuple[str, Put]]] = {
    **{name: (f"sampling.{name}", _number("sampling", name)) for name in SAMPLING_NUMBERS},
    "top_k": ("sampling.top_k", _count("sampling", "top_k", INT32)),
    "seed": ("sampling.seed", _count("sampling", "seed", INT64)),
    "n": ("sampling.n", _count("sampling", "n")),
    "best_of": ("sampling.best_of", _count("sampling", "best_of")),
    "beam_width": ("sampling.beam_width", _count("sampling", "beam_width")),
    "allowed_token_ids": ("sampling.allowed_token_ids", _put_allowed),
    "max_tokens": ("stopping.max_tokens", _count("stopping", "max_tokens")),
    "min_tokens": ("stopping.min_tokens", _count("stopping", "min_tokens")),
    "ignore_eos": ("stopping.ignore_eos", _flag("stopping", "ignore_eos")),
    "include_stop_str_in_output": (
        "stopping.include_stop_in_output",
        _flag("stopping", "include_stop_in_output"),
    ),
    "stop": ("stopping.stop", _put_stop),
    "stop_token_ids": ("stopping.stop_token_ids", _put_stop_ids),
    "skip_special_tokens": ("response.skip_special_tokens", _flag("response", "skip_special_tokens")),
    "stream_interval": ("response.stream_interval", _count("response", "stream_interval")),
    "cache_salt": ("cache.salt", _put_salt),
    "priority": ("priority", _put_priority),
}
