"""Metrics of a finished request."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import collect, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill

ADMISSION = "diptych_request_phase_duration_seconds_count"


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
        await until(lambda: stack.gateway.gate.queue.waiting == 1)
        waiting.cancel()  # it has waited, though for nothing
        await until(lambda: counted() == (0, 1))
        decode.tokens(work, 0, [1])
        decode.finish(work)
        await first
        await stack.until_idle()
        assert counted() == (prompt_tokens, 2)
