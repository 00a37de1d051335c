"""Thousands of calls at once, without deadlines: each is answered or refused by the gateway itself."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import grpc
import pytest

from diptych.v1 import inference_pb2_grpc
from gateway.call import RefusalLog
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import ids_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering, delivered

CALLS = 2000
CHANNELS = 6


async def test_every_call_of_a_burst_ends_ok_or_with_a_refusal_and_bystanders_go_on(
    bundled: ServedModel, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = bundled.tokenizer.encode("Paris")

    async def script(worker: ScriptedDecode, work: object) -> None:
        if bystander_work and work.id.request_id == bystander_work[0].id.request_id:  # type: ignore[attr-defined]
            return
        if not bystander_work:
            bystander_work.append(work)
            worker.tokens(work, 0, answer[:1])  # type: ignore[arg-type]
            return
        await answering(answer)(worker, work)  # type: ignore[arg-type]

    bystander_work: list[object] = []
    decode = ScriptedDecode(script)
    async with running(bundled, redis_url, ScriptedPrefill(), decode, max_queued_tokens=8000) as stack:
        bystander = stack.stub.StreamGenerate(stack.request())
        first = await bystander.read()
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}", options=[("x", number)])
            for number in range(CHANNELS)
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]

        async def call(number: int) -> str:
            try:
                await stubs[number % CHANNELS].Generate(stack.request())
            except grpc.aio.AioRpcError as error:
                hint = "with a hint" * ("grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ()))
                return f"{error.code().name} {hint}"
            return "OK"

        with caplog.at_level(logging.WARNING):
            ends = Counter(await asyncio.gather(*(call(number) for number in range(CALLS))))
        decode.tokens(bystander_work[0], 1, answer[1:])  # type: ignore[arg-type]
        messages = [first]
        while len(ids_of(messages)) < len(answer):
            messages.append(await bystander.read())
        bystander.cancel()
        refused = sum(
            sample.value
            for metric in stack.registry.collect()
            for sample in metric.samples
            if sample.name == "diptych_rejections_total"
        )
        for channel in channels:
            await channel.close()
        await until(lambda: stack.core.gate.queue.running == 0)
    assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED with a hint"}, ends
    assert ends["RESOURCE_EXHAUSTED with a hint"] == refused > 0
    assert "requests refused since the last such line" in caplog.text
    assert ids_of(messages) == answer
    assert delivered(bystander_work[0]) == 0  # type: ignore[arg-type]


async def test_calls_beyond_the_limit_are_refused_with_a_hint(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check `limits.MAX_CALLS` at a lower value: thousands of calls would take a minute."""
    monkeypatch.setattr("gateway.limits.MAX_CALLS", 1)
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode()) as stack:
        waiting = stack.stub.StreamGenerate(stack.request())
        await until(lambda: stack.gateway.calls.running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(stack.request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in dict(caught.value.trailing_metadata() or ())
        waiting.cancel()


def test_refusals_are_logged_at_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = RefusalLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            log.add("QUEUE_FULL")
        now += RefusalLog.EVERY_S
        log.add("DRAINING")
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "1 QUEUE_FULL",
        "1 DRAINING, 49 QUEUE_FULL",
    ]
