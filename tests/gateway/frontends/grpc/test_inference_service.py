"""The public surface around generation: other RPCs, garbage, health, reflection, HTTP, traces."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
import redis
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.access.access import DEFAULT_TENANT
from gateway.frontends.kserve.servicer import SERVICE as KSERVE
from gateway.model.served_model import ServedModel
from tests.diptych.runtime.otlp_collector import OtlpCollector
from tests.gateway.running_gateway import DIGEST, Stack, collect, reason_of, running, until, valkey
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

SERVICE = "diptych.v1.InferenceService"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    yield collector
    collector.stop()


def http(stack: Stack, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{stack.gateway.http_port}{path}", timeout=60) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def health(stack: Stack, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_models_tokens_and_text(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode()) as stack:
        (model,) = (await stack.stub.ListModels(pb.ListModelsRequest())).models
        assert model.name == bundled.card.name
        assert model.vocab_size == bundled.card.vocab_size
        assert model.max_context_length == bundled.card.max_context
        assert model.kv_block_size == 16
        assert model.capabilities.chat
        assert (await stack.stub.GetModel(pb.GetModelRequest(model=model.name))).model == model
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stack.stub.GetModel(pb.GetModelRequest(model="../etc/passwd"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        text = "naïve 😀 " * 2000  # long enough to be worked on in a thread
        tokens = await stack.stub.Tokenize(pb.TokenizeRequest(model=model.name, text=text))
        assert list(tokens.token_ids) == bundled.tokenizer.encode(text, add_special=True)
        back = await stack.stub.Detokenize(
            pb.DetokenizeRequest(model=model.name, token_ids=tokens.token_ids, skip_special_tokens=True)
        )
        assert back.text == text


@pytest.mark.parametrize(
    "method", ["Generate", "Tokenize", "Detokenize", "ListModels", "GetModel", "CancelRequest"]
)
async def test_garbage_is_an_invalid_argument(bundled: ServedModel, redis_url: str, method: str) -> None:
    async with running(bundled, redis_url) as stack:
        call = stack.channel.unary_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff\x01garbage")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == "INVALID_PARAMETER"


async def test_a_bug_shows_no_text(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret prompt")

    async with running(bundled, redis_url) as stack:
        monkeypatch.setattr("gateway.request_parser.parse_request", broken)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(stack.request())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.trailing_metadata())


async def test_a_bug_in_one_request_spares_the_others(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, ScriptedPrefill(), decode) as stack:
        calls = [stack.stub.StreamGenerate(stack.request(request_id=name)) for name in ("bad", "good")]
        works = {w.id.request_id.split("~")[0]: w for w in await decode.wait_for("attach", 2)}
        bad = stack.gateway.live._by_request["bad"][DEFAULT_TENANT]
        monkeypatch.setattr(bad.outputs[0], "push", None)  # the worst row imaginable
        for name in ("bad", "good"):
            decode.tokens(works[name], 0, [1, 2])
            decode.finish(works[name])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(calls[0])
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert (await collect(calls[1]))[-1].usage.completion_tokens == 2
        await stack.until_idle()


async def test_health_and_http_follow_the_workers(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        await asyncio.sleep(0.05)
        assert [await health(stack, ""), await health(stack, SERVICE)] == ["SERVING", "SERVING"]
        assert (await asyncio.to_thread(http, stack, "/ready"))[0] == 200
        await prefill.kill()
        await stack.until_ready(False)
        await asyncio.sleep(0.05)
        assert [await health(stack, ""), await health(stack, SERVICE)] == ["SERVING", "NOT_SERVING"]
        why = "not ready: no prefill worker is linked\n"
        assert await asyncio.to_thread(http, stack, "/ready") == (503, why)
        assert (await asyncio.to_thread(http, stack, "/health"))[0] == 200


async def test_metrics_count_requests(bundled: ServedModel, redis_url: str) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering([1, 2, 3]))
    async with running(bundled, redis_url, *workers) as stack:
        await collect(stack.stub.StreamGenerate(stack.request()))
        await stack.until_idle()
        _, page = await asyncio.to_thread(http, stack, "/metrics")
    name = bundled.card.name
    labels = (
        'gen_ai_operation_name="text_completion",gen_ai_provider_name="diptych",'
        f'gen_ai_request_model="{name}"'
    )
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1.0" in page
    assert "diptych_output_tokens_total 3.0" in page
    assert f'diptych_workers_ready{{model="{name}",role="decode"}} 1.0' in page
    assert f'diptych_model_info{{digest="{DIGEST}",model="{name}"}} 1.0' in page
    assert 'diptych_route_decisions_total{policy="cost",reason="only_choice"} 1.0' in page
    assert f'rpc_method="{SERVICE}/StreamGenerate",rpc_response_status_code="OK"' in page


async def test_metrics_have_the_load_of_the_workers_that_are_linked(
    bundled: ServedModel, redis_url: str
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(total_blocks=40)
    async with running(bundled, redis_url, prefill, decode) as stack:
        model = f'model="{bundled.card.name}"'
        of_prefill = f'{{{model},role="prefill",worker_id="{prefill.worker_id}"}}'
        of_decode = f'{{{model},role="decode",worker_id="{decode.worker_id}"}}'
        _, page = await asyncio.to_thread(http, stack, "/metrics")
        assert f"diptych_worker_requests_waiting{of_prefill} 0.0" in page
        assert f"diptych_worker_kv_cache_blocks{of_decode} 40.0" in page
        await prefill.kill()
        await stack.until_ready(False)
        _, page = await asyncio.to_thread(http, stack, "/metrics")
        assert prefill.worker_id not in page
        assert decode.worker_id in page


async def test_only_the_public_services_are_there(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url) as stack:
        stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
        assert names == {
            SERVICE,
            KSERVE,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call = stack.channel.unary_unary("/diptych.v1.AdminService/ListWorkers")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_no_leading_metadata_before_the_first_token(bundled: ServedModel, redis_url: str) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, ScriptedPrefill(), decode) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        leading = asyncio.ensure_future(call.initial_metadata())
        (work,) = await decode.wait_for("attach")
        await asyncio.sleep(0.1)
        assert not leading.done()
        decode.tokens(work, 0, [1])
        decode.finish(work)
        await collect(call)
        await leading


async def test_the_trace_of_a_request(bundled: ServedModel, redis_url: str, collector: OtlpCollector) -> None:
    times = work_pb2.PhaseTimes(prefill=Duration(nanos=5_000_000))

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, [1, 2])
        worker.finish(work, times)

    prefill, decode = ScriptedPrefill(), ScriptedDecode(script)
    metadata = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
    async with running(bundled, redis_url, prefill, decode) as stack:
        await collect(stack.stub.StreamGenerate(stack.request(), metadata=metadata))
        (attach,) = await decode.wait_for("attach")
        await stack.until_idle()
    spans = {span.name: span for _, span in collector.spans(at_least=5)}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    server, operation = spans[f"{SERVICE}/StreamGenerate"], spans[f"text_completion {bundled.card.name}"]
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    assert operation.parent_span_id == server.span_id
    assert attach.traceparent == f"00-{TRACE}-{operation.span_id.hex()}-01"
    for name in ("tokenize", "admission.wait", "route"):
        assert spans[name].parent_span_id == operation.span_id
    attributes = {a.key: a.value for a in operation.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2
    assert attributes["gen_ai.latency.time_in_model_prefill"].double_value == pytest.approx(0.005)
    route = {a.key: a.value for a in spans["route"].attributes}
    assert route["diptych.route.decode_worker"].string_value == decode.worker_id
    assert "Hello" not in str(spans)


@pytest.mark.parametrize(("deadline_s", "status"), [(None, "CANCELLED"), (0.3, "DEADLINE_EXCEEDED")])
async def test_interrupted_streams_are_traced_as_such(
    bundled: ServedModel, redis_url: str, collector: OtlpCollector, deadline_s: float | None, status: str
) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, ScriptedPrefill(), decode) as stack:
        call = stack.stub.StreamGenerate(stack.request(), timeout=deadline_s)
        await decode.wait_for("attach")
        if deadline_s is None:
            call.cancel()
        await decode.wait_for("cancel")
        await stack.until_idle()
    spans = {span.name: span for _, span in collector.spans(at_least=5)}
    server = {a.key: a.value for a in spans[f"{SERVICE}/StreamGenerate"].attributes}
    assert server["rpc.response.status_code"].string_value == status
    operation = {a.key: a.value for a in spans[f"text_completion {bundled.card.name}"].attributes}
    assert operation["error.type"].string_value == status


async def test_redis_away_disturbs_no_request(bundled: ServedModel) -> None:
    with valkey() as url:
        workers = ScriptedPrefill(), ScriptedDecode(answering([1, 2, 3]))
        async with running(bundled, url, *workers) as stack:
            await collect(stack.stub.StreamGenerate(stack.request()))
            redis.Redis.from_url(url).shutdown(nosave=True)
            await until(lambda: not stack.gateway.mirror.connected)
            for _ in range(3):
                messages = await collect(stack.stub.StreamGenerate(stack.request()))
                assert messages[-1].usage.completion_tokens == 3
            decisions = stack.registry.get_sample_value(
                "diptych_route_decisions_total", {"policy": "cost_without_index", "reason": "only_choice"}
            )
    assert decisions == 3
