"""Admission by KV memory in a real gateway."""

from __future__ import annotations

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import collect, running, until
from tests.gateway.scripted_workers import BLOCK_SIZE, ScriptedDecode, ScriptedPrefill

BLOCKS = 16
LONG = pb.StoppingCriteria(max_tokens=8 * BLOCK_SIZE)  # with its prompt more than half of the blocks


class Quarantining(ScriptedDecode):
    """Says how many of its blocks are in quarantine."""

    quarantined = 0

    def load(self) -> work_pb2.Load:
        return work_pb2.Load(total_blocks=self.total_blocks, quarantined_blocks=self.quarantined)


async def test_request_waits_until_its_kv_memory_fits(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(total_blocks=BLOCKS)
    async with running(bundled, redis_url, prefill, decode) as stack:
        queue = stack.core.gate.queue
        assert queue.kv.capacity == BLOCKS * BLOCK_SIZE
        calls = [stack.stub.StreamGenerate(stack.request(stopping=LONG)) for _ in range(2)]
        (first,) = await decode.wait_for("attach")
        await until(lambda: queue.waiting == 1)
        decode.tokens(first, 0, [5])  # its prompt waits no more: only memory does
        await until(lambda: queue.dispatched_tokens == 0)
        assert queue.waiting == 1
        decode.finish(first)
        _, second = await decode.wait_for("attach", 2)
        decode.tokens(second, 0, [5])
        decode.finish(second)
        for call in calls:
            await collect(call)
        await stack.until_idle()
        assert queue.kv.reserved == 0


async def test_tenant_with_short_outputs_is_admitted_at_once(bundled: ServedModel, redis_url: str) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, [5])
        worker.finish(work)

    prefill, decode = ScriptedPrefill(), ScriptedDecode(script, total_blocks=BLOCKS)
    async with running(bundled, redis_url, prefill, decode) as stack:
        await collect(stack.stub.StreamGenerate(stack.request(stopping=LONG)))
        decode.script = None
        calls = [stack.stub.StreamGenerate(stack.request(stopping=LONG)) for _ in range(3)]
        works = (await decode.wait_for("attach", 4))[1:]
        for work in works:
            decode.tokens(work, 0, [5])
            decode.finish(work)
        for call in calls:
            await collect(call)
        await stack.until_idle()


async def test_quarantined_blocks_do_not_count_as_capacity(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(), Quarantining(total_blocks=BLOCKS)
    async with running(bundled, redis_url, prefill, decode) as stack:
        kv = stack.core.gate.queue.kv
        for quarantined in (5, 0):
            decode.quarantined = quarantined
            await until(lambda: kv.capacity == (BLOCKS - decode.quarantined) * BLOCK_SIZE)
