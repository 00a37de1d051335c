"""Clients that stop reading their streams: others are served, and what waits is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.heap_trim import HeapTrim
from gateway.model.served_model import ServedModel
from gateway.slow_readers import HOLE_BYTES, LEAST_BYTES, ReaderLimits, UnreadOutput
from tests.gateway.frontends.kserve.tensors import asking
from tests.gateway.running_gateway import Stack, collect, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill
from tests.gateway.slow_streams import fixed_window, stopped_reader, talking, wordy

STREAM = "diptych.v1.InferenceService/StreamGenerate"
KSERVE = "inference.GRPCInferenceService/ModelStreamInfer"


@contextlib.asynccontextmanager
async def gateway_of(
    model: ServedModel, redis_url: str, **settings: Any
) -> AsyncIterator[tuple[Stack, grpc.aio.Channel, ScriptedDecode]]:
    """Yield a gateway, a channel with a fixed window, and a decode worker with much to say."""
    decode = ScriptedDecode(talking(), total_blocks=100_000)
    workers = ScriptedPrefill(total_blocks=100_000), decode
    async with running(model, redis_url, *workers, **settings) as stack:
        channel = fixed_window(stack)
        yield stack, channel, decode
        await channel.close()
        await stack.until_idle()
        assert stack.gateway.unread_output.bytes == 0


def value(stack: Stack, name: str, **labels: str) -> float:
    return stack.registry.get_sample_value(name, labels) or 0.0


def calls(stack: Stack, code: str, method: str = STREAM) -> float:
    labels = {"rpc_method": method, "rpc_response_status_code": code}
    return value(stack, "rpc_server_call_duration_seconds_count", **labels)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors in the log, but for gRPC's about event loops of earlier tests."""
    failed = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    return [message for message in failed if "PollerCompletionQueue" not in message]


async def test_stopped_reader_with_72_choices_does_not_block_others(
    bundled: ServedModel, redis_url: str
) -> None:
    settings = {"max_inflight": 72, "write_timeout": 3600.0}  # what it blocks stays so
    async with gateway_of(bundled, redis_url, **settings) as (stack, channel, decode):
        decode.script = talking(200)
        call = await stopped_reader(channel, wordy(stack, n=72))
        for _ in range(3):
            others = [stack.stub.Generate(stack.request(), timeout=60) for _ in range(4)]
            for answer in await asyncio.gather(*others):
                assert answer.usage.completion_tokens
        await until(lambda: not stack.core.gate.queue.running)
        assert stack.gateway.calls.running == 1, "its places are back, and it is not read"
        call.cancel()


async def test_request_with_more_choices_than_places_finishes(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_of(bundled, redis_url, max_inflight=8) as (stack, _, _):
        messages = await collect(stack.stub.StreamGenerate(wordy(stack, n=20)))
        ends = [output.index for m in messages for output in m.outputs if output.finish_reason]
        assert sorted(ends) == list(range(20))


async def test_reader_that_takes_nothing_in_time_gets_slow_reader(
    bundled: ServedModel, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_of(bundled, redis_url, write_timeout=0.5) as (stack, channel, decode):
        decode.script = talking(finish=False)
        call = await stopped_reader(channel, wordy(stack, request_id="stopped"))
        await decode.wait_for("cancel")
        await until(lambda: not stack.gateway.calls.running)
        queue = stack.core.gate.queue
        assert (queue.running, stack.gateway.unread_output.bytes, len(stack.gateway.live)) == (0, 0, 0)
        assert value(stack, "diptych_slow_readers_total", limit="write_s") == 1
        assert calls(stack, "ABORTED") == 1
        assert any("stopped" in line and "SLOW_READER" in line for line in caplog.messages)
        with pytest.raises(grpc.aio.AioRpcError) as ended:  # it reads again
            await collect(call)
        assert (ended.value.code(), reason_of(ended.value)) == (grpc.StatusCode.ABORTED, "SLOW_READER")
        assert not errors(caplog)


async def test_rpc_is_given_up_when_its_status_is_not_taken(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.frontends.grpc.stream_end.STATUS_S", 0.3)
    async with gateway_of(bundled, redis_url, write_timeout=0.3) as (stack, channel, _):
        call = await stopped_reader(channel, wordy(stack))
        await until(lambda: calls(stack, "ABORTED") == 1)
        await until(lambda: not stack.gateway.calls.running)
        await stack.until_idle()
        call.cancel()


async def test_rpc_is_given_up_when_its_end_is_not_read(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_of(bundled, redis_url, write_timeout=0.5) as (stack, channel, decode):
        decode.script = talking(80)
        before = rpcs()
        call = await stopped_reader(channel, wordy(stack))
        await until(lambda: not stack.gateway.calls.running)
        await until(lambda: rpcs() == before)
        call.cancel()


def rpcs() -> int:
    return sum(task.get_name() == "rpc_task" for task in asyncio.all_tasks())


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"stream_buffer_mib": 1}, "stream_bytes"),
        ({"stream_buffer_mib": 64, "total_stream_buffer_mib": 1}, "total_bytes"),
    ],
)
async def test_unread_output_beyond_its_bound_ends_the_stream(
    bundled: ServedModel, redis_url: str, limits: dict[str, int], limit: str
) -> None:
    async with gateway_of(bundled, redis_url, **limits) as (stack, channel, decode):
        decode.script = talking(finish=False, pause_s=0.01)
        highest = 0
        call = await stopped_reader(channel, wordy(stack, n=4))
        while not calls(stack, "ABORTED"):
            highest = max(highest, stack.gateway.unread_output.bytes)
            await asyncio.sleep(0)
        assert value(stack, "diptych_slow_readers_total", limit=limit) == 1
        assert 0 < highest < 3 << 20
        call.cancel()


async def test_total_bound_ends_the_stream_with_most_unread(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_of(bundled, redis_url, total_stream_buffer_mib=2) as (stack, channel, decode):
        small = await stopped_reader(channel, wordy(stack))
        await until(lambda: stack.gateway.unread_output.bytes > 0)
        decode.script = talking(finish=False, pause_s=0.01)
        large = await stopped_reader(channel, wordy(stack, n=8))
        await until(lambda: calls(stack, "ABORTED") == 1)
        assert stack.gateway.calls.running == 1
        messages = await collect(small)
        assert messages[-1].usage.completion_tokens
        large.cancel()


@pytest.mark.parametrize("how", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_end_by_the_client_of_an_unread_stream_has_its_status(
    bundled: ServedModel, redis_url: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with gateway_of(bundled, redis_url) as (stack, channel, decode):
        decode.script = talking(finish=False, pause_s=0.002, per_step=5)
        streams: list[Any] = []
        timeout, early = 1.0 if how == "DEADLINE_EXCEEDED" else 60.0, 0
        while len(streams) < 20:
            try:
                streams.append(await stopped_reader(channel, wordy(stack), timeout=timeout))
            except grpc.aio.AioRpcError as error:  # a busy machine takes longer than that to begin
                assert error.code().name == how  # noqa: PT017
                timeout, early = 2 * timeout, early + 1
        for index, call in enumerate(streams):
            if how == "CANCELLED":
                await asyncio.sleep(0.01 * (index % 5))
                call.cancel()
        await until(lambda: calls(stack, how) >= 20)
        await stack.until_idle()
        assert calls(stack, how) <= 20 + early
        assert calls(stack, "INTERNAL") == 0
        assert not errors(caplog)


async def open_http(stack: Stack, **headers: str) -> tuple[bytes, asyncio.StreamWriter]:
    """Begin an event stream with much output over a connection with small buffers; read its status line."""
    body = {"model": stack.model.card.name, "prompt": "x", "stream": True, "max_tokens": 8000}
    data = json.dumps({**body, "logprobs": 5, "n": 2}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port, limit=1024)
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    writer.write("\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    return await reader.readline(), writer


def http_calls(stack: Stack) -> float:
    labels = {"http_route": "/v1/completions", "http_response_status_code": "200"}
    return value(stack, "http_server_request_duration_seconds_count", **labels)


@pytest.mark.parametrize("ended_by", ["the write limit", "the deadline"])
async def test_http_reader_that_stops_is_disconnected(
    bundled: ServedModel,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ended_by: str,
) -> None:
    monkeypatch.setattr("gateway.frontends.openai.http_call.LAST_EVENT_S", 0.3)
    slow = ended_by == "the write limit"
    async with gateway_of(bundled, redis_url, write_timeout=0.5 if slow else 60.0) as (stack, _, decode):
        decode.script = talking(8000, finish=False, per_step=100, pause_s=0.01)
        timeout_ms, early = 2000, 0
        while True:
            limits = {} if slow else {"x_request_timeout_ms": f"{timeout_ms}"}
            status, writer = await open_http(stack, **limits)
            if slow or b"504" not in status:
                break
            writer.close()  # a busy machine takes longer than that to begin
            timeout_ms, early = 2 * timeout_ms, early + 1
        assert b"200" in status
        await until(lambda: http_calls(stack) == 1)
        await stack.until_idle()
        error = "SLOW_READER" if slow else "DEADLINE_EXCEEDED"
        labels = {
            "gen_ai_operation_name": "text_completion",
            "gen_ai_request_model": stack.model.card.name,
            "gen_ai_provider_name": "diptych",
            "error_type": error,
        }
        assert value(stack, "gen_ai_server_request_duration_seconds_count", **labels) == 1 + early
        assert value(stack, "diptych_slow_readers_total", limit="write_s") == slow
        assert not errors(caplog)
        writer.close()


async def test_kserve_stream_that_is_not_read_ends_with_all_its_requests(
    bundled: ServedModel, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()

    async def held(worker: ScriptedDecode, work: Any) -> None:
        await release.wait()
        await talking(8000, finish=False)(worker, work)

    async with gateway_of(bundled, redis_url, write_timeout=0.5) as (stack, channel, decode):
        decode.script = held
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        for name in ("a", "b", "c"):
            await call.write(asking(id=name, max_tokens=8000))
        await decode.wait_for("attach", 3)
        release.set()
        await call.read()
        await until(lambda: calls(stack, "ABORTED", KSERVE) == 3)
        await decode.wait_for("cancel", 3)
        await stack.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await collect(call)
        assert (ended.value.code(), reason_of(ended.value)) == (grpc.StatusCode.ABORTED, "SLOW_READER")
        assert not errors(caplog)


async def test_kserve_deadline_of_one_request_leaves_an_unread_stream_whole(
    bundled: ServedModel, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The response that it was writing is written in the end, and the other request's after it."""
    async with gateway_of(bundled, redis_url) as (stack, channel, decode):
        decode.script = talking(8000, finish=False)
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        timeout_us, early = 1_000_000, 0
        while True:
            await call.write(asking(id="short", max_tokens=8000, timeout=timeout_us))
            if not (await call.read()).error_message.startswith("DEADLINE_EXCEEDED"):
                break
            timeout_us, early = 2 * timeout_us, early + 1  # a busy machine takes longer than that to begin
        await until(lambda: calls(stack, "DEADLINE_EXCEEDED", KSERVE) == 1 + early)
        decode.script = talking(20)
        await call.write(asking(id="long", max_tokens=20))
        await call.done_writing()
        messages = await collect(call)
        assert {message.infer_response.id for message in messages} == {"short", "long"}
        assert any(m.error_message.startswith("DEADLINE_EXCEEDED") for m in messages)
        assert not errors(caplog)


@pytest.mark.parametrize(
    ("streams", "largest", "trims"),
    [(1, HOLE_BYTES, 1), (72, HOLE_BYTES // 2, 36), (15, LEAST_BYTES, 0), (5000, LEAST_BYTES - 1, 0)],
)
def test_heap_is_trimmed_for_what_streams_leave_together(streams: int, largest: int, trims: int) -> None:
    heap = Mock(HeapTrim)
    unread = UnreadOutput(ReaderLimits(), Mock(GatewayMetrics), heap)
    for _ in range(streams):
        unread.freed(largest)
    assert heap.request.call_count == trims
