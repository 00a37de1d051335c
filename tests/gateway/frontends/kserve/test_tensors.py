"""Tensors, typed and raw, both ways; what does not fit its shape is refused by its path."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import DiptychError
from gateway.frontends.kserve import tensors
from gateway.frontends.kserve.tensors import add_output, read_inputs
from tests.gateway.frontends.kserve.tensors import add, asking, asking_raw, raw_texts

NUMPY = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "FP64": np.float64,
}


def field_of(request: oip.ModelInferRequest) -> str:
    with pytest.raises(DiptychError) as refused:
        read_inputs(request)
    return refused.value.violations[0].field


@pytest.mark.parametrize("datatype", NUMPY)
def test_raw_numbers_are_those_of_numpy(datatype: str) -> None:
    values = np.array([[0, 1], [1, 100]]).astype(NUMPY[datatype])
    read = read_inputs(asking_raw(("a", datatype, [2, 2], values.tobytes())))["a"]
    assert (read.path, read.datatype, list(read.values)) == ("inputs[a]", datatype, values.flatten().tolist())


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_raw_texts_are_read(texts: list[bytes]) -> None:
    read = read_inputs(asking_raw(("a", "BYTES", [len(texts)], raw_texts(*texts))))["a"]
    assert list(read.values) == texts


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("BYTES", [b"x", b""]), ("BOOL", [True]), ("INT32", [-1, 2]), ("UINT64", [2**64 - 1]), ("FP64", [0.5])],
)
def test_typed_contents_are_read(datatype: str, values: list[Any]) -> None:
    assert list(read_inputs(asking(None, inputs={"a": (datatype, values)}))["a"].values) == values


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT32", [2], b"\0" * 4),
        ("INT32", [1], b"\0" * 8),
        ("INT64", [1], b""),
        ("FP32", [0], b"\0"),
        ("BYTES", [1], b""),
        ("BYTES", [1], b"\1\0\0"),
        ("BYTES", [1], b"\5\0\0\0abcd"),
        ("BYTES", [1], b"\xff\xff\xff\xffabcd"),
        ("BYTES", [1], raw_texts(b"a", b"b")),
        ("BYTES", [2], raw_texts(b"a")),
        ("INT32", [-1], b"\0" * 4),
        ("INT32", [-2, -2], b"\0" * 16),
        ("INT32", [2**62, 2**62], b""),
        ("INT32", [tensors.MAX_ELEMENTS + 1], b"\0" * 4 * (tensors.MAX_ELEMENTS + 1)),
        ("BYTES", [tensors.MAX_TEXTS + 1], b"\0" * 4 * (tensors.MAX_TEXTS + 1)),
        ("INT32", [1] * (tensors.MAX_DIMENSIONS + 1), b"\0" * 4),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(datatype: str, shape: list[int], data: bytes) -> None:
    assert field_of(asking_raw(("a", datatype, shape, data))) == "inputs[a].shape"


def test_the_largest_shapes_are_read() -> None:
    ids = asking_raw(("a", "UINT8", [tensors.MAX_ELEMENTS], b"\7" * tensors.MAX_ELEMENTS))
    texts = asking_raw(("a", "BYTES", [tensors.MAX_TEXTS], b"\0" * 4 * tensors.MAX_TEXTS))
    deep = asking_raw(("a", "INT32", [1] * tensors.MAX_DIMENSIONS, struct.pack("<i", 5)))
    assert len(read_inputs(ids)["a"].values) == tensors.MAX_ELEMENTS
    assert len(read_inputs(texts)["a"].values) == tensors.MAX_TEXTS
    assert list(read_inputs(deep)["a"].values) == [5]


def test_faults_are_named_with_their_field() -> None:
    twice = asking("x")
    add(twice, "text_input", "BYTES", [b"y"])
    assert field_of(twice) == "inputs[text_input]"
    unknown = asking("x")
    unknown.inputs[0].datatype = "FP16"
    assert field_of(unknown) == "inputs[text_input].datatype"
    short = asking("x")
    short.inputs[0].shape[:] = [2]
    assert field_of(short) == "inputs[text_input].contents"
    other = asking("x")
    other.inputs[0].datatype = "INT32"  # its contents are those of BYTES
    assert field_of(other) == "inputs[text_input].contents"
    both = asking_raw(("a", "INT32", [1], b"\0" * 4))
    both.inputs[0].contents.int_contents.append(0)
    assert field_of(both) == "inputs[a].contents"
    missing = asking_raw(("a", "INT32", [1], b"\0" * 4))
    missing.inputs.add(name="b", datatype="INT32", shape=[1])
    assert field_of(missing) == "raw_input_contents"
    elsewhere = asking("x")
    elsewhere.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert field_of(elsewhere) == "inputs[text_input].parameters[shared_memory_region]"
    many = asking(None, inputs={str(i): ("INT32", [1]) for i in range(tensors.MAX_INPUTS + 1)})
    assert field_of(many) == "inputs"


def test_outputs_as_they_are_asked_for() -> None:
    typed, raw = oip.ModelInferResponse(), oip.ModelInferResponse()
    for response in (typed, raw):
        for name, datatype, values in (("t", "BYTES", [b"ab", b""]), ("i", "INT64", [1, -2])):
            add_output(response, name, datatype, values, raw=response is raw)  # type: ignore[arg-type]
    assert [list(t.shape) for t in raw.outputs] == [[2], [2]]
    assert list(raw.raw_output_contents) == [raw_texts(b"ab", b""), struct.pack("<qq", 1, -2)]
    assert not any(t.HasField("contents") for t in raw.outputs)
    assert list(typed.outputs[0].contents.bytes_contents) == [b"ab", b""]
    assert list(typed.outputs[1].contents.int64_contents) == [1, -2]
    assert not typed.raw_output_contents
