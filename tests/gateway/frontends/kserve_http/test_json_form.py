"""Bodies of the Open Inference Protocol as messages of its gRPC form, and what is refused of them."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import InvalidParameter
from gateway.frontends.kserve.tensors import read_inputs
from gateway.frontends.kserve_http.json_form import infer_json, read_infer
from gateway.frontends.kserve_http.routes import ModelPath, read_path

TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello"]}
IDS = {"name": "token_ids", "shape": [2, 2], "datatype": "INT64", "data": [[1, 2], [3, 4]]}


def read(**members: Any) -> oip.ModelInferRequest:
    return read_infer(json.dumps(members).encode(), None, "m", "")


def test_body_becomes_the_message_of_the_rpc() -> None:
    request = read(
        id="mine",
        inputs=[TEXT, IDS],
        outputs=[{"name": "text_output", "parameters": {"binary_data": False}}],
        parameters={"max_tokens": 4, "temperature": 0.5, "ignore_eos": True, "stop": "x", "seed": 2**63},
    )
    assert (request.model_name, request.id) == ("m", "mine")
    inputs = read_inputs(request)
    assert inputs["text_input"].values == [b"Hello"]
    assert inputs["token_ids"].values == [1, 2, 3, 4]
    assert [output.name for output in request.outputs] == ["text_output"]
    found = {
        name: getattr(one, str(one.WhichOneof("parameter_choice")))
        for name, one in request.parameters.items()
    }
    assert found == {"max_tokens": 4, "temperature": 0.5, "ignore_eos": True, "stop": "x", "seed": 2**63}


def test_binary_data_behind_the_json_are_raw_contents() -> None:
    texts = struct.pack("<I", 5) + b"Hello"
    tensor = {key: value for key, value in TEXT.items() if key != "data"}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(texts)}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    request = read_infer(head + texts, len(head), "m", "1")
    assert read_inputs(request)["text_input"].values == [b"Hello"]
    assert not request.parameters
    for wrong in (texts[:-1], texts + b"x"):
        with pytest.raises(InvalidParameter, match="bytes of binary data"):
            read_infer(head + wrong, len(head), "m", "1")
    with pytest.raises(InvalidParameter, match="longer than the body"):
        read_infer(head, len(head) + 1, "m", "1")


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"inputs": [TEXT], "prompt": "x"}, "prompt"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": [1]}, "inputs[0]"),
        ({"inputs": [{**TEXT, "data": [1]}]}, "inputs[0].data"),
        ({"inputs": [{**TEXT, "data": "Hello"}]}, "inputs[0].data"),
        ({"inputs": [{**IDS, "data": [[1, 2], 3]}]}, "inputs[0].data"),
        ({"inputs": [{**IDS, "data": [True]}]}, "inputs[0].data"),
        ({"inputs": [{**IDS, "data": [1.5]}]}, "inputs[0].data"),
        ({"inputs": [{**IDS, "data": [2**64]}]}, "inputs[0].data"),
        ({"inputs": [{**IDS, "shape": [2**70]}]}, "inputs[0].shape"),
        ({"inputs": [{**IDS, "shape": "2"}]}, "inputs[0].shape"),
        ({"inputs": [{**IDS, "values": []}]}, "inputs[0].values"),
        ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 3}}]}, "inputs[0].data"),
        ({"inputs": [TEXT], "parameters": {"stop": [1]}}, "parameters[stop]"),
        ({"inputs": [TEXT], "parameters": []}, "parameters"),
        ({"inputs": [TEXT], "parameters": {"binary_data_output": 1}}, "parameters[binary_data_output]"),
        ({"inputs": [TEXT], "outputs": [{"name": 1}]}, "outputs[0].name"),
        ({"inputs": [TEXT], "id": 7}, "id"),
    ],
)
def test_fault_is_named_by_its_member(members: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read(**members)
    assert refused.value.violations[0].field == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.dictionaries(st.sampled_from(["id", "inputs", "outputs", "parameters", "name", "x"]), JSON)
TENSORS = st.lists(
    st.dictionaries(
        st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), JSON | st.just("INT32")
    )
)


@given(MEMBERS, st.none() | TENSORS)
def test_any_body_is_read_or_refused(members: dict[str, Any], tensors: list[dict[str, Any]] | None) -> None:
    with contextlib.suppress(InvalidParameter):
        read(**members, **({} if tensors is None or "inputs" in members else {"inputs": tensors}))


def test_response_has_texts_and_numbers() -> None:
    response = oip.ModelInferResponse(model_name="m", model_version="1", id="mine")
    response.parameters["completion_tokens"].int64_param = 2
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        "é".encode()
    )
    response.outputs.add(name="token_ids", datatype="INT64", shape=[2]).contents.int64_contents.extend([5, 6])
    assert infer_json(response) == {
        "model_name": "m",
        "model_version": "1",
        "id": "mine",
        "parameters": {"completion_tokens": 2},
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["é"]},
            {"name": "token_ids", "datatype": "INT64", "shape": [2], "data": [5, 6]},
        ],
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("m", ModelPath("m", "", "")),
        ("m/ready", ModelPath("m", "", "ready")),
        ("org/m/infer", ModelPath("org/m", "", "infer")),
        ("org/m/versions/1/infer", ModelPath("org/m", "1", "infer")),
        ("m/versions/1", ModelPath("m", "1", "")),
        ("ready", ModelPath("ready", "", "")),
        ("", None),
        ("m//infer", None),
    ],
)
def test_path_is_read_from_its_end(path: str, expected: ModelPath | None) -> None:
    assert read_path(f"/v2/models/{path}") == expected
