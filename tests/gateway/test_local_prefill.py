"""Requests whose decode worker computes the prompt itself, with scripted workers behind a real gateway."""

from __future__ import annotations

import grpc
import pytest

from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import Stack, collect, ids_of, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering, delivered

LOCAL = work_pb2.PhaseTimes(local_prefill=True, prefill_steps=1)


class LocalDecode(ScriptedDecode):
    """Computes prompts of up to ``short`` or ``fallback`` tokens itself, unless it has to ``refuse``."""

    def __init__(self, *, short: int = 64, fallback: int = 64, refuse: bool = False) -> None:
        super().__init__(self.answer)
        self.short, self.fallback, self.refuse = short, fallback, refuse

    def load(self) -> work_pb2.Load:
        load = super().load()
        load.max_local_prefill_tokens, load.max_fallback_prefill_tokens = self.short, self.fallback
        load.local_prefill_chunk = 32
        return load

    async def answer(self, worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.local_prefill and self.refuse:
            self.fail(work, work_pb2.FAILURE_REASON_TOO_MANY_NEW)
            return
        times = LOCAL if work.local_prefill else work_pb2.PhaseTimes(prefill_steps=1)
        for index in range(delivered(work), 3):
            self.tokens(work, index, [100 + index], times=times if index == delivered(work) else None)
        self.finish(work, times)


def sample(stack: Stack, name: str, **labels: str) -> float | None:
    return stack.registry.get_sample_value(name, labels)


async def reported(stack: Stack) -> None:
    """Wait until the decode worker has said what it computes itself."""
    linked = stack.core.worker_pool.registry.linked
    await until(lambda: any(worker.load.max_local_prefill_tokens for worker in linked()))


async def test_local_prompt_reaches_no_prefill_worker(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), LocalDecode()
    async with running(bundled, redis_url, prefill, decode, local_prefill="always") as stack:
        await reported(stack)
        messages = await collect(stack.stub.StreamGenerate(stack.request()))
        assert ids_of(messages) == [100, 101, 102]
        assert messages[-1].timings.local_prefill
        assert [kind for kind, _ in prefill.sent if kind == "dispatch"] == []
        await stack.until_idle()
        assert sample(stack, "diptych_prompts_computed_total", by="decode") == 1
        assert sample(stack, "diptych_prompts_computed_total", by="prefill") == 0


async def test_too_many_new_tokens_are_dispatched_remotely(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), LocalDecode(refuse=True)
    async with running(bundled, redis_url, prefill, decode, local_prefill="always") as stack:
        await reported(stack)
        messages = await collect(stack.stub.StreamGenerate(stack.request()))
        assert ids_of(messages) == [100, 101, 102]
        first, second = await decode.wait_for("attach", 2)
        (dispatch,) = await prefill.wait_for("dispatch")
        assert (first.local_prefill, second.local_prefill) == (work_pb2.LOCAL_PREFILL_SHORT, 0)
        assert dispatch.work == second
        timings = messages[-1].timings
        assert (timings.local_prefill, timings.retries) == (False, 0)
        await stack.until_idle()
        assert sample(stack, "diptych_prompts_computed_total", by="prefill") == 1


async def test_prompt_logprobs_come_from_the_decode_worker(bundled: ServedModel, redis_url: str) -> None:
    class Scoring(LocalDecode):
        async def answer(self, worker: ScriptedDecode, work: work_pb2.Work) -> None:
            scores = [work_pb2.Score(logprob=-1.0, rank=2) for _ in work.token_ids[1:]]
            self.say(prompt_scores=work_pb2.PromptScores(id=work.id, first_position=1, scores=scores))
            await super().answer(worker, work)

    async with running(bundled, redis_url, ScriptedPrefill(), Scoring(), local_prefill="always") as stack:
        await reported(stack)
        request = stack.request("one two three", response={"prompt_logprobs": 0})
        messages = await collect(stack.stub.StreamGenerate(request))
        assert ids_of(messages) == [100, 101, 102]
        assert len(messages[0].prompt.logprobs) >= 2


async def test_short_prompts_are_served_without_a_prefill_worker(
    bundled: ServedModel, redis_url: str
) -> None:
    decode = LocalDecode(short=0, fallback=8)
    async with running(bundled, redis_url, decode, worker_wait_timeout=0.3) as stack:
        await until(lambda: stack.core.worker_pool.registry.fallback_tokens == 8)
        messages = await collect(stack.stub.StreamGenerate(stack.request()))
        assert ids_of(messages) == [100, 101, 102]
        (attach,) = await decode.wait_for("attach")
        assert attach.local_prefill == work_pb2.LOCAL_PREFILL_FALLBACK
        assert not stack.gateway.ready  # long prompts would wait
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.stub.Generate(stack.request("word " * 50))
        assert reason_of(refused.value) == "NO_READY_WORKER"


async def test_never_serves_nothing_without_a_prefill_worker(bundled: ServedModel, redis_url: str) -> None:
    decode = LocalDecode()
    async with running(bundled, redis_url, decode, worker_wait_timeout=0.3, local_prefill="never") as stack:
        await reported(stack)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.stub.Generate(stack.request())
        assert reason_of(refused.value) == "NO_READY_WORKER"
        assert [kind for kind, _ in decode.sent if kind == "attach"] == []


async def test_worker_without_bounds_gets_no_local_prompt(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(answering([7]))
    async with running(bundled, redis_url, prefill, decode, local_prefill="always") as stack:
        assert ids_of(await collect(stack.stub.StreamGenerate(stack.request()))) == [7]
        await prefill.wait_for("dispatch")
