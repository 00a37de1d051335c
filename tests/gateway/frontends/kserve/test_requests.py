"""A request → the core's request. Errors name the field as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.kserve.parameters import MAX_PARAMETERS
from gateway.frontends.kserve.request import read_request, with_client_field
from gateway.model.served_model import ServedModel
from gateway.request.validation import parse_message, parse_request
from tests.gateway.frontends.kserve.tensors import MODEL, add, asking, asking_raw, raw_texts


def read(request: oip.ModelInferRequest, *, streaming: bool = True) -> pb.GenerateRequest:
    return read_request(request, streaming=streaming).request


def with_json(**members: Any) -> oip.ModelInferRequest:
    return asking(inputs={"sampling_parameters": ("BYTES", [json.dumps(members).encode()])})


def test_prompt_tensors_are_read() -> None:
    assert read(asking("Hé")).text == "Hé"
    assert read(asking_raw(("text_input", "BYTES", [1, 1], raw_texts(b"x")))).text == "x"
    for name in ("token_ids", "input_ids"):
        for datatype in ("INT32", "INT64", "UINT32", "UINT64"):
            asked = read(asking(None, inputs={name: (datatype, [5, 6])}))
            assert list(asked.token_ids.ids) == [5, 6]


def test_parameters_are_read_from_all_three_places() -> None:
    expected = pb.GenerateRequest(
        model=MODEL,
        text="Count:",
        sampling=pb.SamplingParams(temperature=0.5, top_k=4, seed=-3, n=2),
        stopping=pb.StoppingCriteria(max_tokens=7, ignore_eos=True, stop=["a"]),
        response=pb.ResponseOptions(timings=False, text=True, token_ids=True),
        priority=-2,
    )
    knobs = {"temperature": 0.5, "top_k": 4, "seed": -3, "n": 2, "max_tokens": 7}
    knobs |= {"ignore_eos": True, "stop": "a", "priority": 2}
    as_tensors = {
        "temperature": ("FP32", [0.5]),
        "top_k": ("INT32", [4]),
        "seed": ("INT64", [-3]),
        "n": ("UINT32", [2]),
        "max_tokens": ("INT32", [7]),
        "ignore_eos": ("BOOL", [True]),
        "stop": ("BYTES", [b"a"]),
        "priority": ("UINT64", [2]),
    }
    as_strings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in knobs.items()}
    for request in (
        asking(**knobs),
        with_json(**knobs),
        with_json(**as_strings),  # as clients of Triton's vLLM backend write them
        asking(**as_strings),
        asking(inputs=as_tensors),
    ):
        assert read(request) == expected


def test_lists_are_read_from_tensors_and_json() -> None:
    expected = pb.StoppingCriteria(stop=["a", "b"], stop_token_ids=[1, 2])
    tensors = {"stop": ("BYTES", [b"a", b"b"]), "stop_token_ids": ("INT32", [1, 2])}
    assert read(asking(inputs=tensors)).stopping == expected
    assert read(with_json(stop=["a", "b"], stop_token_ids=[1, 2])).stopping == expected


def test_stream_timeout_and_outputs_are_read() -> None:
    assert read_request(asking(), streaming=True).stream
    assert not read_request(asking(stream=False), streaming=True).stream
    assert not read_request(asking(inputs={"stream": ("BOOL", [False])}), streaming=True).stream
    assert not read_request(asking(), streaming=False).stream
    assert read_request(asking(), streaming=True).timeout_s is None
    assert read_request(asking(timeout=0), streaming=True).timeout_s is None
    assert read_request(asking(timeout=1_500_000), streaming=True).timeout_s == 1.5
    assert read_request(asking(timeout="1500000"), streaming=True).timeout_s == 1.5
    assert not read_request(asking(), streaming=True).raw
    assert read_request(asking_raw(("text_input", "BYTES", [1], raw_texts(b"x"))), streaming=True).raw
    request = asking(exclude_input_in_output=True, triton_enable_empty_final_response=True)
    request.outputs.add(name="token_ids")
    asked = read_request(request, streaming=True)
    assert asked.outputs == {"token_ids"}
    assert (asked.request.response.text, asked.request.response.token_ids) == (False, True)


def changed(request: oip.ModelInferRequest, **fields: Any) -> oip.ModelInferRequest:
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def with_outputs(*names: str) -> oip.ModelInferRequest:
    request = asking()
    for name in names:
        request.outputs.add(name=name)
    return request


def classified() -> oip.ModelInferRequest:
    request = with_outputs("text_output")
    request.outputs[0].parameters["classification"].int64_param = 3
    return request


def two_prompts() -> oip.ModelInferRequest:
    request = asking("x")
    add(request, "token_ids", "INT32", [1])
    return request


BAD: list[tuple[oip.ModelInferRequest, str]] = [
    (asking(None), "inputs"),
    (two_prompts(), "inputs"),
    (asking(None, inputs={"text_input": ("BYTES", [b"a", b"b"])}), "inputs[text_input]"),
    (asking(None, inputs={"text_input": ("BYTES", [b"\xff"])}), "inputs[text_input]"),
    (asking(None, inputs={"text_input": ("FP32", [1.0])}), "inputs[text_input].datatype"),
    (asking(None, inputs={"token_ids": ("INT32", [1, -1])}), "inputs[token_ids][1]"),
    (asking(colour="red"), "parameters[colour]"),
    (asking(**{"a\nb": "red"}), "parameters[a?b]"),
    (asking(**{str(i): 1 for i in range(MAX_PARAMETERS + 1)}), "parameters"),
    (asking(temperature="hot"), "parameters[temperature]"),
    (asking(temperature=True), "parameters[temperature]"),
    (asking(temperature="1e999"), "parameters[temperature]"),
    (asking(max_tokens=1.5), "parameters[max_tokens]"),
    (asking(max_tokens=-1), "parameters[max_tokens]"),
    (asking(max_tokens="9" * 33), "parameters[max_tokens]"),
    (asking(ignore_eos=1), "parameters[ignore_eos]"),
    (asking(stream="maybe"), "parameters[stream]"),
    (asking(timeout=-1), "parameters[timeout]"),
    (asking(timeout="soon"), "parameters[timeout]"),
    (asking(timeout=2**62), "parameters[timeout]"),
    (asking(exclude_input_in_output=False), "parameters[exclude_input_in_output]"),
    (asking(inputs={"max_tokens": ("INT32", [1, 2])}), "inputs[max_tokens]"),
    (asking(inputs={"max_tokens": ("INT32", [3])}, max_tokens=3), "inputs[max_tokens]"),
    (asking(inputs={"sampling_parameters": ("BYTES", [b"{"])}), "inputs[sampling_parameters]"),
    (asking(inputs={"sampling_parameters": ("BYTES", [b"[]"])}), "inputs[sampling_parameters]"),
    (asking(inputs={"sampling_parameters": ("INT32", [1])}), "inputs[sampling_parameters]"),
    (with_json(top_p="x"), "sampling_parameters.top_p"),
    (with_json(stop=[1]), "sampling_parameters.stop"),
    (with_json(stop_token_ids=[1, "x"]), "sampling_parameters.stop_token_ids[1]"),
    (with_json(colour="red"), "sampling_parameters.colour"),
    (with_outputs("logits"), "outputs[0].name"),
    (with_outputs(*4 * ["text_output"]), "outputs"),
    (classified(), "outputs[0].parameters[classification]"),
    # What only the core knows to be wrong.
    (asking(top_p=2.0), "parameters[top_p]"),
    (with_json(top_p=2.0), "sampling_parameters.top_p"),
    (asking(inputs={"top_p": ("FP32", [2.0])}), "inputs[top_p]"),
    (asking(n=0), "parameters[n]"),
    (asking(stop=""), "parameters[stop]"),
    (asking(cache_salt="\n"), "parameters[cache_salt]"),
    (asking(""), "inputs[text_input]"),
    (asking(None, inputs={"token_ids": ("INT64", [1, 4_000_000_000])}), "inputs[token_ids]"),
    (asking(None, inputs={"token_ids": ("INT64", [])}), "inputs[token_ids]"),
    (asking(None, inputs={"top_k": ("INT32", [4]), "text_input": ("BYTES", [b""])}), "inputs[text_input]"),
    (asking(id="no spaces"), "id"),
    (changed(asking(), model_name=""), "model_name"),
]


def refusal(request: oip.ModelInferRequest, model: ServedModel) -> DiptychError:
    """Return the error of the frontend or of the core, as the frontend sends it."""
    try:
        asked = read_request(request, streaming=True)
    except DiptychError as error:
        return error
    with pytest.raises(DiptychError) as refused:
        parse_request(asked.request, model)
    return with_client_field(refused.value, asked.names)


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{i}-{field}" for i, (_, field) in enumerate(BAD)])
def test_errors_name_the_clients_field(
    bundled: ServedModel, request_: oip.ModelInferRequest, field: str
) -> None:
    error = refusal(request_, bundled)
    assert [violation.field for violation in error.violations] == [field]
    assert error.code.name == "INVALID_ARGUMENT"
    assert field in error.message


def test_a_prompt_that_is_too_long_is_named_as_its_tensor(bundled: ServedModel) -> None:
    error = refusal(asking(max_tokens=10**6), bundled)
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert [violation.field for violation in error.violations] == ["parameters[max_tokens]"]
    error = refusal(asking("a b c " * 10**5), bundled)
    assert [violation.field for violation in error.violations] == ["inputs[text_input]"]


def test_another_model_or_version_is_not_found(bundled: ServedModel) -> None:
    for request in (changed(asking(), model_name="other"), changed(asking(), model_version="2")):
        with pytest.raises(DiptychError) as refused:
            parse_request(read(request), bundled)
        assert refused.value.reason == "UNKNOWN_MODEL"
    assert parse_request(read(changed(asking(), model_version="1")), bundled).model == MODEL


def test_stream_parameter_needs_the_streaming_rpc() -> None:
    with pytest.raises(DiptychError) as refused:
        read_request(asking(stream=True), streaming=False)
    assert refused.value.reason == "UNSUPPORTED_FEATURE"


@given(st.binary(max_size=300))
def test_any_message_is_read_or_refused(data: bytes) -> None:
    try:
        read_request(parse_message(oip.ModelInferRequest, data), streaming=True)
    except DiptychError as error:
        assert error.code.name in ("INVALID_ARGUMENT", "NOT_FOUND")  # noqa: PT017
