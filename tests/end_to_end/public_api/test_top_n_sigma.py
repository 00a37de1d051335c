"""`top_n_sigma` through every API: close to nothing, it leaves the greedy token alone at any temperature."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import grpc
import pytest

from diptych.client import Client
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc as oip_rpc
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import MODEL

PROMPT, LENGTH = "Once upon a time", 24
HOT = {"temperature": 50.0, "seed": 3, "max_tokens": LENGTH, "ignore_eos": True}
NEAR = {**HOT, "top_n_sigma": 1e-3}


@pytest.fixture(scope="module")
def greedy(stack: Stack) -> str:
    greedy = client_text(stack, {**HOT, "temperature": 0.0})
    assert greedy != client_text(stack, HOT)
    return greedy


def client_text(stack: Stack, options: dict[str, Any]) -> str:
    with Client(stack.address) as client:
        return client.generate(PROMPT, **options).text


def test_client(stack: Stack, greedy: str) -> None:
    assert client_text(stack, NEAR) == greedy


def test_grpc(stack: Stack, greedy: str) -> None:
    sampling = pb.SamplingParams(temperature=50.0, seed=3, top_n_sigma=1e-3)
    stopping = pb.StoppingCriteria(max_tokens=LENGTH, ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling, stopping=stopping)
    with grpc.insecure_channel(stack.address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        assert stub.Generate(request, timeout=60).outputs[0].text == greedy
        request.sampling.top_n_sigma = -1.0
        with pytest.raises(grpc.RpcError, match=r"sampling\.top_n_sigma: must be a number from 0 to 1000"):
            stub.Generate(request, timeout=60)


def test_http(stack: Stack, greedy: str) -> None:
    url = f"http://127.0.0.1:{stack.account['gateway']['http_port']}/v1/completions"
    body = json.dumps({"model": MODEL, "prompt": PROMPT, **NEAR}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"] == greedy


def test_kserve(stack: Stack, greedy: str) -> None:
    message = oip.ModelInferRequest(model_name=MODEL)
    text = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(PROMPT.encode())
    knobs = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    knobs.contents.bytes_contents.append(json.dumps(NEAR).encode())
    with grpc.insecure_channel(stack.address) as channel:
        answer = oip_rpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60)
    texts = [tensor.contents.bytes_contents[0] for tensor in answer.outputs if tensor.name == "text_output"]
    assert texts == [greedy.encode()]
