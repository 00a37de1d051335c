"""Metrics of a finished request."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import Stack, collect, ids_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill

PHASE = "diptych_request_phase_duration_seconds"
ADMISSION = f"{PHASE}_count"
PIECES = ([5, 6, 7], [8, 9, 10], [11])
PAUSE_S = 0.05


def value(stack: Stack, name: str, **labels: str) -> float | None:
    return stack.registry.get_sample_value(name, labels)


async def test_refused_requests_count_no_wait_and_no_input_tokens(
    bundled: ServedModel, redis_url: str
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, max_inflight=1, max_queued_tokens=60) as stack:
        prompt_tokens = len(bundled.tokenizer.encode("Hello", add_special=False))

        def counted() -> tuple[float | None, float | None]:
            value = stack.registry.get_sample_value
            return value("diptych_input_tokens_total"), value(
                ADMISSION, {"role": "gateway", "phase": "admission"}
            )

        first = asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request())))
        (work,) = await decode.wait_for("attach")
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await collect(stack.stub.StreamGenerate(stack.request("more than fits " * 40)))
        assert counted() == (0, 0)
        waiting = stack.stub.StreamGenerate(stack.request())
        await until(lambda: stack.core.gate.queue.waiting == 1)
        waiting.cancel()  # it has waited, though for nothing
        await until(lambda: counted() == (0, 1))
        decode.tokens(work, 0, [1])
        decode.finish(work)
        await first
        await stack.until_idle()
        assert counted() == (prompt_tokens, 2)


async def test_gateway_exports_the_phases_that_the_workers_measured(
    bundled: ServedModel, redis_url: str
) -> None:
    seconds = {
        "prefill_queue": 0.5,
        "grant_wait": 0.25,
        "prefill": 2.0,
        "kv_send": 0.125,
        "kv_receive": 0.25,
        "decode_queue": 0.0625,
    }
    times = work_pb2.PhaseTimes()
    for field, duration in seconds.items():
        getattr(times, field).FromNanoseconds(int(duration * 1e9))
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        answer = asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request())))
        (work,) = await decode.wait_for("attach")
        decode.tokens(work, 0, [1])
        decode.finish(work, times)
        await answer
        await stack.until_idle()
        sums = {
            phase: value(stack, f"{PHASE}_sum", role="gateway", phase=phase)
            for phase in ("queue", "kv_alloc_wait", "prefill", "kv_transfer", "decode_queue")
        }
        waited = value(stack, "diptych_request_queue_duration_seconds_sum")
        admission = value(stack, f"{PHASE}_sum", role="gateway", phase="admission")
        decoded = value(stack, f"{PHASE}_count", role="gateway", phase="decode")
    expected = {
        "queue": 0.5,
        "kv_alloc_wait": 0.25,
        "prefill": 2.0,
        "kv_transfer": 0.375,
        "decode_queue": 0.0625,
    }
    assert sums == expected
    assert admission is not None
    assert waited == pytest.approx(admission + 0.75)
    assert decoded == 0  # one token: that phase never ran


async def test_gateway_exports_lengths_ends_and_token_latency(bundled: ServedModel, redis_url: str) -> None:
    """Each pause begins when the client has the piece before, so that lateness cannot shorten it."""
    messages: list[pb.GenerateResponse] = []

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        sent = 0
        for piece in PIECES:
            if sent:
                await until(lambda: len(ids_of(messages)) == sent)  # noqa: B023
                await asyncio.sleep(PAUSE_S)
            worker.tokens(work, sent, piece)
            sent += len(piece)
        worker.finish(work)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        async for message in stack.stub.StreamGenerate(stack.request()):
            messages.append(message)
        await stack.until_idle()
        prompt_tokens = len(bundled.tokenizer.encode("Hello", add_special=False))
        assert value(stack, "diptych_request_input_tokens_sum") == prompt_tokens
        assert value(stack, "diptych_request_output_tokens_sum") == 7
        assert value(stack, "diptych_choices_ended_total", reason="length") == 1
        # Pieces of 3, 3 and 1 tokens: what came first has nothing before it.
        assert value(stack, "diptych_inter_token_latency_seconds_count") == 4
        latency = value(stack, "diptych_inter_token_latency_seconds_sum")
        assert latency is not None
        assert 0.99 * 2 * PAUSE_S <= latency < 30  # clocks may differ by a little
        assert value(stack, "diptych_inter_token_latency_seconds_bucket", le="0.001") == 0


async def test_choices_of_a_cancelled_request_end_as_cancelled(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (work,) = await decode.wait_for("attach")
        decode.tokens(work, 0, [1])
        await call.read()
        call.cancel()
        await until(lambda: value(stack, "diptych_choices_ended_total", reason="cancelled") == 1)
        assert value(stack, "diptych_choices_ended_total", reason="error") == 0


async def test_series_with_known_labels_exist_before_the_first_request(
    bundled: ServedModel, redis_url: str
) -> None:
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode()) as stack:
        for reason in ("QUEUE_FULL", "QUOTA_EXCEEDED", "NO_READY_WORKER", "DRAINING", "WORKER_LOST"):
            assert value(stack, "diptych_rejections_total", reason=reason) == 0
        assert value(stack, "diptych_rejections_total", reason="INVALID_PARAMETER") is None
        for cause in ("worker_lost", "preempted"):
            assert value(stack, "diptych_retries_total", cause=cause) == 0
        assert value(stack, "diptych_route_decisions_total", policy="cost", reason="prefix") == 0
        for reason in ("stop", "length", "time_limit", "cancelled", "error"):
            assert value(stack, "diptych_choices_ended_total", reason=reason) == 0
        for phase in ("admission", "prefill", "kv_transfer", "decode"):
            assert value(stack, ADMISSION, role="gateway", phase=phase) == 0
