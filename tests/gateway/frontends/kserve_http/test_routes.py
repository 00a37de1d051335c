"""The Open Inference Protocol over HTTP, through real sockets, with scripted workers behind it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import aiohttp

from diptych.kserve.v2 import open_inference_pb2 as oip
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys
from tests.gateway.access.locked_gateway import serving
from tests.gateway.frontends.kserve.tensors import MODEL
from tests.gateway.frontends.kserve.test_servicer import TEXT, gateway_api, ids_of
from tests.gateway.running_gateway import Stack, running

INPUT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello"]}


async def ask(
    stack: Stack, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{stack.gateway.http_port}/v2{path}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", url, data=data, headers=given) as answer,
    ):
        return answer.status, await answer.json()


async def test_paths_describe_server_and_model(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, stub, _):
        assert (await ask(stack, ""))[1]["name"] == "diptych"
        assert await ask(stack, "/health/live") == (200, {"live": True})
        assert await ask(stack, "/health/ready") == (200, {"ready": True})
        assert await ask(stack, f"/models/{MODEL}/ready") == (200, {"name": MODEL, "ready": True})
        status, metadata = await ask(stack, f"/models/{MODEL}/versions/1")
        assert (status, metadata["name"], metadata["versions"]) == (200, MODEL, ["1"])
        assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
        _, config = await ask(stack, f"/models/{MODEL}/config")
        assert config["output"][1] == {"name": "token_ids", "data_type": "TYPE_INT64", "dims": [-1]}
        same = (await stub.ModelConfig(oip.ModelConfigRequest(name=MODEL))).config
        assert (same.name, same.max_batch_size) == (MODEL, config["max_batch_size"])
        assert same.model_transaction_policy.decoupled
        assert [one.name for one in same.input] == [one["name"] for one in config["input"]]
        status, refused = await ask(stack, "/models/other")
        assert status == 404
        assert isinstance(refused["error"], str)
        assert (await ask(stack, f"/models/{MODEL}/versions/2"))[0] == 404
        assert (await ask(stack, "/nothing"))[0] == 404


async def test_answer_is_that_of_the_rpc(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, decode):
        body = {"id": "mine", "inputs": [INPUT], "parameters": {"max_tokens": 9, "temperature": 0.5}}
        status, answer = await ask(stack, f"/models/{MODEL}/infer", body)
        (work,) = await decode.wait_for("attach")
        assert (status, answer["id"], answer["model_version"]) == (200, "mine", "1")
        outputs = {one["name"]: one["data"] for one in answer["outputs"]}
        expected = {"text_output": [TEXT], "token_ids": ids_of(bundled), "finish_reason": ["length"]}
        assert outputs == expected
        assert answer["parameters"]["completion_tokens"] == len(ids_of(bundled))
        assert (work.stopping.max_tokens, work.sampling.temperature) == (9, 0.5)


async def test_binary_inputs_of_tritons_client(bundled: ServedModel, redis_url: str) -> None:
    texts = struct.pack("<I", 5) + b"Hello"
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES"}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(texts)}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    async with gateway_api(bundled, redis_url) as (stack, *_):
        status, answer = await ask(stack, f"/models/{MODEL}/infer", head + texts, headers)
        assert (status, answer["outputs"][0]["data"]) == (200, [TEXT])


async def test_fault_is_a_text_with_the_members_name(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, *_):
        for body, where in (
            ({"inputs": [INPUT, INPUT]}, "inputs[text_input]"),
            ({"inputs": [INPUT], "parameters": {"temperature": -1}}, "parameters[temperature]"),
            ({"inputs": [{**INPUT, "shape": [2]}]}, "inputs[text_input].contents"),
            ({"inputs": [INPUT], "parameters": {"stream": True}}, "parameters[stream]"),
            (b"{", "body"),
        ):
            status, refused = await ask(stack, f"/models/{MODEL}/infer", body)
            assert status == 400
            assert where in refused["error"]
        status, refused = await ask(stack, f"/models/{MODEL}/infer", {}, {"Content-Type": "text/plain"})
        assert (status, refused["error"]) == (415, "Content-Type must be application/json")


async def test_without_workers_it_is_not_ready(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, worker_wait_timeout=0) as stack:
        assert await ask(stack, "/health/ready") == (503, {"ready": False})
        assert (await ask(stack, f"/models/{MODEL}/ready"))[0] == 503
        assert (await ask(stack, f"/models/{MODEL}/infer", {"inputs": [INPUT]}))[0] == 503


async def test_models_need_a_key_and_health_needs_none(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    key = keys.add("acme")
    async with serving(bundled, redis_url, keys) as stack:
        assert (await ask(stack, "/health/live"))[0] == 200
        for path, body in ((f"/models/{MODEL}", None), (f"/models/{MODEL}/infer", {"inputs": [INPUT]})):
            status, refused = await ask(stack, path, body)
            assert status == 401
            assert "API key" in refused["error"]
            allowed = {"Authorization": f"Bearer {key}"}
            assert (await ask(stack, path, body, allowed))[0] == 200
        await stack.until_idle()
