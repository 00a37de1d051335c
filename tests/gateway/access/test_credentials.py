"""Keys, scopes and tenants over the real sockets of a gateway, in each of its APIs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.v1 import admin_pb2, admin_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.access.locked_gateway import OUTPUT, completion, failure, http, serving
from tests.gateway.failing_calls import check_http, told
from tests.gateway.frontends.kserve.tensors import asking
from tests.gateway.running_gateway import collect, until
from tests.gateway.scripted_workers import ScriptedDecode, answering

Code = grpc.StatusCode


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.jsonl")


@pytest.mark.parametrize("key", ["", "dk-wrong"])
async def test_every_api_refuses_an_invalid_key(
    bundled: ServedModel, redis_url: str, keys: Keys, key: str
) -> None:
    keys.add("acme")
    metadata = bearer(key) if key else ()
    async with serving(bundled, redis_url, keys) as stack:
        calls = [
            stack.stub.Generate(stack.request(), metadata=metadata),
            collect(stack.stub.StreamGenerate(stack.request(), metadata=metadata)),
            stack.stub.Tokenize(pb.TokenizeRequest(), metadata=metadata),
            stack.stub.Detokenize(pb.DetokenizeRequest(), metadata=metadata),
            stack.stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            stack.stub.GetModel(pb.GetModelRequest(), metadata=metadata),
            stack.stub.CancelRequest(pb.CancelRequestRequest(), metadata=metadata),
        ]
        triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        calls += [
            triton.ModelInfer(asking(), metadata=metadata),
            triton.ModelMetadata(oip.ModelMetadataRequest(), metadata=metadata),
            triton.ModelReady(oip.ModelReadyRequest(), metadata=metadata),
            triton.ServerMetadata(oip.ServerMetadataRequest(), metadata=metadata),
            collect(triton.ModelStreamInfer(iter([asking()]), metadata=metadata)),
        ]
        for call in calls:
            found = told(await failure(call))
            assert (found.code, found.reason) == (Code.UNAUTHENTICATED, "UNAUTHENTICATED")
        paths = ["/v1/models", "/v1/models/x"]
        posts = ["/v1/completions", "/v1/chat/completions"]
        for path, body in [*((p, None) for p in paths), *((p, completion(stack)) for p in posts)]:
            status, text, headers = await http(stack, path, key, body)
            assert status == 401
            assert check_http(status, text, headers)["code"] == "unauthenticated"
            assert headers["WWW-Authenticate"] == "Bearer"
        refused = stack.registry.get_sample_value(
            "http_server_request_duration_seconds_count",
            {"http_route": "/v1/completions", "http_response_status_code": "401"},
        )
        assert refused == 1.0


async def test_every_api_accepts_a_valid_key(bundled: ServedModel, redis_url: str, keys: Keys) -> None:
    key = keys.add("acme")
    async with serving(bundled, redis_url, keys) as stack:
        assert (await stack.stub.Generate(stack.request(), metadata=bearer(key))).usage.completion_tokens == 3
        triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        assert await triton.ModelInfer(asking(), metadata=bearer(key))
        streamed = await collect(triton.ModelStreamInfer(iter([asking(id="r")]), metadata=bearer(key)))
        assert not any(message.error_message for message in streamed)
        assert (await http(stack, "/v1/models", key))[0] == 200
        assert (await http(stack, "/v1/completions", key, completion(stack)))[0] == 200
        several = completion(stack, prompt=["a", "b"])
        assert (await http(stack, "/v1/completions", key, several))[0] == 200


async def test_probes_need_no_key(bundled: ServedModel, redis_url: str, keys: Keys) -> None:
    keys.add("acme")
    async with serving(bundled, redis_url, keys) as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="diptych.v1.InferenceService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        assert (await triton.ServerLive(oip.ServerLiveRequest())).live
        assert (await triton.ServerReady(oip.ServerReadyRequest())).ready
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await http(stack, path))[0] == 200


async def test_methods_require_their_scope(bundled: ServedModel, redis_url: str, keys: Keys) -> None:
    key, operator = keys.add("acme"), keys.add("ops", "admin")
    async with serving(bundled, redis_url, keys) as stack:
        found = told(await failure(stack.stub.Generate(stack.request(), metadata=bearer(operator))))
        assert (found.code, found.reason) == (Code.PERMISSION_DENIED, "PERMISSION_DENIED")
        status, text, headers = await http(stack, "/v1/completions", operator, completion(stack))
        assert (status, check_http(status, text, headers)["code"]) == (403, "permission_denied")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.admin_port}") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            listing = admin_pb2.ListWorkersRequest()
            assert (await failure(admin.ListWorkers(listing))).code() is Code.UNAUTHENTICATED
            assert (
                await failure(admin.ListWorkers(listing, metadata=bearer(key)))
            ).code() is Code.PERMISSION_DENIED
            watching = admin.WatchLoad(admin_pb2.WatchLoadRequest(), metadata=bearer(key))
            assert (await failure(watching.read())).code() is Code.PERMISSION_DENIED
            assert len((await admin.ListWorkers(listing, metadata=bearer(operator))).workers) == 2


async def test_request_is_visible_to_its_tenant_only(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    """Another tenant may use the same id and cannot cancel it; a second key of its own tenant can."""
    acme, colleague, other = keys.add("acme"), keys.add("acme"), keys.add("other")
    cancel = pb.CancelRequestRequest(request_id="mine")
    async with serving(bundled, redis_url, keys, ScriptedDecode()) as stack:

        def start(key: str) -> Any:
            return asyncio.ensure_future(
                stack.stub.Generate(stack.request(request_id="mine"), metadata=bearer(key))
            )

        running = start(acme)
        await until(lambda: stack.core.gate.queue.running == 1)
        found = told(await failure(stack.stub.CancelRequest(cancel, metadata=bearer(other))))
        assert (found.code, found.reason) == (Code.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert told(await failure(start(colleague))).code is Code.ALREADY_EXISTS
        second = start(other)
        await until(lambda: stack.core.gate.queue.running == 2)
        assert (await stack.stub.CancelRequest(cancel, metadata=bearer(other))).was_running
        assert (await second).outputs[0].finish_reason == pb.FINISH_REASON_CANCELLED
        assert not running.done()
        assert (await stack.stub.CancelRequest(cancel, metadata=bearer(colleague))).was_running
        assert (await running).outputs[0].finish_reason == pb.FINISH_REASON_CANCELLED
        assert not (await stack.stub.CancelRequest(cancel, metadata=bearer(other))).was_running


async def test_stream_is_resumable_by_its_tenant_only(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    acme, colleague, other = keys.add("acme"), keys.add("acme"), keys.add("other")
    async with serving(bundled, redis_url, keys) as stack:
        request = stack.request(stopping={"max_tokens": 3})
        messages = await collect(stack.stub.StreamGenerate(request, metadata=bearer(acme)))
        resumed = pb.GenerateRequest(
            resume_token=messages[0].resume_token, received_token_ids=messages[0].outputs[0].token_ids
        )
        resumed.MergeFrom(request)
        found = told(await failure(collect(stack.stub.StreamGenerate(resumed, metadata=bearer(other)))))
        assert (found.code, found.fields) == (Code.INVALID_ARGUMENT, ["resume_token"])
        rest = await collect(stack.stub.StreamGenerate(resumed, metadata=bearer(colleague)))
        ids = [i for message in (messages[0], *rest) for output in message.outputs for i in output.token_ids]
        assert ids == OUTPUT


async def test_tenant_reaches_the_queue_and_the_cache_salt(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    tenants = {name: keys.add(name) for name in ("acme", "other")}
    decode = ScriptedDecode(answering(OUTPUT))
    offered: list[str] = []
    async with serving(bundled, redis_url, keys, decode) as stack:
        queue = stack.core.gate.queue
        enqueue = queue.enqueue

        def listening(*values: Any, **named: Any) -> Any:
            offered.append(named["tenant"])
            return enqueue(*values, **named)

        queue.enqueue = listening  # type: ignore[method-assign]
        for key in tenants.values():
            for salt in ("", "same"):
                await stack.stub.Generate(stack.request(cache={"salt": salt}), metadata=bearer(key))
    works = [message for kind, message in decode.sent if kind == "attach"]
    assert offered == ["acme", "acme", "other", "other"]
    assert len({work.cache_namespace for work in works}) == 4


async def test_removed_key_is_refused_while_the_gateway_runs(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    key, _ = keys.add("acme"), keys.add("other")
    async with serving(bundled, redis_url, keys) as stack:
        await stack.stub.Generate(stack.request(), metadata=bearer(key))
        keys.remove(key)
        code = Code.OK
        async with asyncio.timeout(60):
            while code is Code.OK:
                call = stack.stub.Generate(stack.request(), metadata=bearer(key))
                code = await call.code()
                await asyncio.sleep(0.1)
        assert code is Code.UNAUTHENTICATED
