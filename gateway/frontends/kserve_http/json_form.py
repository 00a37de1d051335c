"""JSON of the Open Inference Protocol and the messages of its gRPC form, both ways.

Inputs come as JSON or, of Triton's binary extension, as raw contents behind it: then all of them do. Outputs
are always JSON. Pure.

Source: KServe's "Open Inference Protocol", HTTP/REST; Triton's "Binary Tensor Data Extension".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import InvalidParameter, printable
from gateway.frontends.kserve.parameters import MAX_PARAMETERS, boolean
from gateway.frontends.kserve.tensors import (
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_INPUTS,
    contents_field,
    text_of,
)
from gateway.request.json_values import array, integer, members, parse_body, string

BINARY_SIZE: Final = "binary_data_size"
_ANY_BINARY: Final = frozenset({"binary_data_output"})
_OUTPUT_BINARY: Final = frozenset({"binary_data"})
_LARGEST: Final = (-(2**63), 2**64 - 1)
_SIZES: Final = (-(2**63), 2**63 - 1)
_MEMBERS: Final = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_MEMBERS: Final = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OUTPUT_MEMBERS: Final = frozenset({"name", "parameters"})


def read_infer(body: bytes, json_bytes: int | None, name: str, version: str) -> oip.ModelInferRequest:
    """Return the request of a body. Raises InvalidParameter that names the member.

    Args:
        body: as it came.
        json_bytes: of it; what follows is binary. None: all of it is JSON.
        name: of the model, by the path.
        version: by the path; empty: any.
    """
    if json_bytes is not None and json_bytes > len(body):
        raise InvalidParameter("Inference-Header-Content-Length", "is longer than the body")
    found = parse_body(body if json_bytes is None else body[:json_bytes])
    _refuse_unknown("", found, _MEMBERS)
    request = oip.ModelInferRequest(model_name=name, model_version=version)
    if found.get("id") is not None:
        request.id = string("id", found["id"])
    _put_parameters(request.parameters, "parameters", found.get("parameters"), _ANY_BINARY)
    sizes: list[int | None] = []
    for path, member in _objects("inputs", found.get("inputs")):
        sizes.append(_put_input(request.inputs.add(), path, member))
    for path, member in _objects("outputs", found.get("outputs")):
        output = request.outputs.add()
        _refuse_unknown(path, member, _OUTPUT_MEMBERS)
        output.name = string(f"{path}.name", member.get("name"))
        _put_parameters(output.parameters, f"{path}.parameters", member.get("parameters"), _OUTPUT_BINARY)
    _put_binary(request, b"" if json_bytes is None else body[json_bytes:], sizes)
    return request


def _objects(path: str, value: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    for index, one in enumerate(array(path, [] if value is None else value, MAX_INPUTS)):
        yield f"{path}[{index}]", members(f"{path}[{index}]", one)


def _refuse_unknown(path: str, given: Mapping[str, object], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            where = f"{path}." if path else ""
            raise InvalidParameter(f"{where}{printable(name)}", "is not a member that this server knows")


def _put_parameters(target: Any, path: str, value: object, left_out: frozenset[str]) -> None:
    """Set parameters in a map of the message; `left_out` says how tensors are sent, which is decided here."""
    if value is None:
        return
    given = members(path, value)
    if len(given) > MAX_PARAMETERS:
        raise InvalidParameter(path, f"must have at most {MAX_PARAMETERS} elements")
    for name, one in given.items():
        where = f"{path}[{printable(name)}]"
        if name in left_out:
            boolean(where, one)
        elif isinstance(one, bool):
            target[name].bool_param = one
        elif isinstance(one, int):
            number = integer(where, one, _LARGEST)
            if number > _SIZES[1]:
                target[name].uint64_param = number
            else:
                target[name].int64_param = number
        elif isinstance(one, float):
            target[name].double_param = one
        else:
            target[name].string_param = string(where, one)


def _put_input(
    tensor: oip.ModelInferRequest.InferInputTensor, path: str, given: Mapping[str, object]
) -> int | None:
    """Set an input, and return its bytes behind the JSON; None where it has data."""
    _refuse_unknown(path, given, _INPUT_MEMBERS)
    tensor.name = string(f"{path}.name", given.get("name"))
    tensor.datatype = string(f"{path}.datatype", given.get("datatype"))
    shape = array(f"{path}.shape", given.get("shape"), MAX_DIMENSIONS)
    tensor.shape.extend(integer(f"{path}.shape", size, _SIZES) for size in shape)
    found = given.get("parameters")
    parameters = dict(members(f"{path}.parameters", {} if found is None else found))
    size = parameters.pop(BINARY_SIZE, None)
    _put_parameters(tensor.parameters, f"{path}.parameters", parameters, frozenset())
    if size is not None:
        if "data" in given:
            raise InvalidParameter(f"{path}.data", "must not be there beside binary data")
        return integer(f"{path}.parameters[{BINARY_SIZE}]", size, (0, _SIZES[1]))
    _put_data(tensor, f"{path}.data", given.get("data"))
    return None


def _put_data(tensor: oip.ModelInferRequest.InferInputTensor, path: str, data: object) -> None:
    values = _flat(path, data)
    field = contents_field(tensor.datatype)
    if field is None:
        return  # refused by its datatype, where tensors are read
    if tensor.datatype == "BYTES":
        tensor.contents.bytes_contents.extend(string(path, one).encode() for one in values)
        return
    if any(isinstance(one, bool) != (tensor.datatype == "BOOL") for one in values):
        raise InvalidParameter(path, f"must have elements of {tensor.datatype}")
    try:
        getattr(tensor.contents, field).extend(values)
    except (TypeError, ValueError):
        raise InvalidParameter(path, f"must have elements of {tensor.datatype}") from None


def _flat(path: str, data: object) -> list[object]:
    """Return the elements of nested lists in row-major order."""
    level = array(path, data, MAX_ELEMENTS)
    for _ in range(MAX_DIMENSIONS):
        if not any(isinstance(one, list) for one in level):
            return level
        if not all(isinstance(one, list) for one in level):
            break
        level = [one for part in level if isinstance(part, list) for one in part]
        if len(level) > MAX_ELEMENTS:
            raise InvalidParameter(path, f"must have at most {MAX_ELEMENTS} elements")
    raise InvalidParameter(path, f"must be lists of equal depth, of at most {MAX_DIMENSIONS}")


def _put_binary(request: oip.ModelInferRequest, data: bytes, sizes: Sequence[int | None]) -> None:
    lengths = [size for size in sizes if size is not None]
    if lengths and len(lengths) < len(sizes):
        raise InvalidParameter("inputs", "must all have binary data, or none")
    if sum(lengths) != len(data):
        raise InvalidParameter("inputs", f"have {sum(lengths)} bytes of binary data, and {len(data)} came")
    at = 0
    for length in lengths:
        request.raw_input_contents.append(data[at : at + length])
        at += length


def infer_json(response: oip.ModelInferResponse) -> dict[str, object]:
    """Return a response as the protocol's object; its contents are typed."""
    return {
        "model_name": response.model_name,
        "model_version": response.model_version,
        "id": response.id,
        "parameters": {name: one.int64_param for name, one in response.parameters.items()},
        "outputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "data": text_of(tensor.datatype, tensor.contents),
            }
            for tensor in response.outputs
        ],
    }


def metadata_json(metadata: oip.ModelMetadataResponse) -> dict[str, object]:
    """Return the description of a model as the protocol's object."""

    def tensors(some: Sequence[oip.ModelMetadataResponse.TensorMetadata]) -> list[dict[str, object]]:
        return [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in some]

    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": tensors(metadata.inputs),
        "outputs": tensors(metadata.outputs),
    }


def config_json(config: oip.ModelConfig) -> dict[str, object]:
    """Return a configuration as Triton's object."""
    return {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": [
            {
                "name": one.name,
                "data_type": oip.DataType.Name(one.data_type),
                "dims": list(one.dims),
                "optional": one.optional,
            }
            for one in config.input
        ],
        "output": [
            {"name": one.name, "data_type": oip.DataType.Name(one.data_type), "dims": list(one.dims)}
            for one in config.output
        ],
        "parameters": {name: {"string_value": one.string_value} for name, one in config.parameters.items()},
        "model_transaction_policy": {"decoupled": config.model_transaction_policy.decoupled},
    }
