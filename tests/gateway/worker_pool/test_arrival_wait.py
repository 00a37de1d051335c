"""New requests wait briefly for workers: the real gateway over real gRPC, with scripted workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import ServedModel
from gateway.worker_pool.arrival_wait import FIRST_WAIT_S, MAX_WAITING, START_WAIT_S, STARTING_S, ArrivalWait
from tests.gateway.running_gateway import DIGEST, collect, ids_of, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering


async def test_request_waits_for_workers_of_a_starting_system(bundled: ServedModel, redis_url: str) -> None:
    answer = bundled.tokenizer.encode("Paris")
    workers = [ScriptedPrefill(), ScriptedDecode(answering(answer))]
    async with running(bundled, redis_url) as stack:
        call = stack.stub.StreamGenerate(stack.request(), timeout=30)
        await until(lambda: len(stack.core.worker_pool.arrivals) == 1)
        for worker in workers:
            await worker.start(redis_url, DIGEST)
        assert ids_of(await collect(call)) == answer
        await stack.until_idle()
        for worker in workers:
            await worker.close()


@pytest.mark.parametrize("role", [ScriptedPrefill, ScriptedDecode])
async def test_request_waits_for_a_worker_that_was_there_a_moment_ago(
    bundled: ServedModel, redis_url: str, role: type
) -> None:
    answer = bundled.tokenizer.encode("Paris")
    prefill, decode = ScriptedPrefill(), ScriptedDecode(answering(answer))
    back = ScriptedPrefill() if role is ScriptedPrefill else ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, prefill, decode) as stack:
        await (prefill if role is ScriptedPrefill else decode).kill()
        await stack.until_ready(False)
        call = stack.stub.StreamGenerate(stack.request(), timeout=30)
        await until(lambda: len(stack.core.worker_pool.arrivals) == 1)
        await back.start(redis_url, DIGEST)
        assert ids_of(await collect(call)) == answer
        await back.close()


async def test_wait_of_a_new_request_ends_with_its_deadline(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(stack.request(), timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.until_idle()


async def test_wait_of_a_new_request_ends_with_the_gateway(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        await until(lambda: len(stack.core.worker_pool.arrivals) == 1)
        await stack.gateway.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert reason_of(caught.value) == "DRAINING"


async def test_request_that_waited_is_bounded_by_the_memory_of_the_workers_that_came(
    bundled: ServedModel, redis_url: str
) -> None:
    small = [ScriptedPrefill(), ScriptedDecode(total_blocks=4)]  # 64 tokens
    async with running(bundled, redis_url) as stack:
        too_long = stack.stub.StreamGenerate(stack.request(stopping=pb.StoppingCriteria(max_tokens=64)))
        open_ended = stack.stub.StreamGenerate(stack.request())
        await until(lambda: len(stack.core.worker_pool.arrivals) == 2)
        for worker in small:
            await worker.start(redis_url, DIGEST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(too_long)
        assert reason_of(caught.value) == "CONTEXT_LENGTH_EXCEEDED"
        (attach,) = await small[1].wait_for("attach")
        assert attach.stopping.max_tokens + attach.prompt_tokens == 64
        open_ended.cancel()
        for worker in small:
            await worker.close()


def test_wait_is_as_long_as_the_state_of_the_workers_warrants() -> None:
    now, complete = 0.0, False
    waits = ArrivalWait(lambda: complete, 60.0, lambda: now)
    assert waits.wait_s() == START_WAIT_S
    now = STARTING_S - 1
    assert waits.wait_s() == 1
    now = STARTING_S + 1
    assert waits.wait_s() == 0
    complete = True
    waits.update()
    now, complete = now + 100, False
    waits.update()
    now += 1
    assert waits.wait_s() == pytest.approx(FIRST_WAIT_S - 1)
    now += FIRST_WAIT_S
    assert waits.wait_s() == 0


async def test_number_of_waiting_requests_is_bounded() -> None:
    waits = ArrivalWait(lambda: False, 60.0, asyncio.get_running_loop().time)
    waiting = [asyncio.create_task(waits.wait(None)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert waits.wait_s() == 0
    await asyncio.wait_for(waits.wait(None), 1)
    waits.release()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert len(waits) == 0


async def test_waits_end_in_the_order_of_arrival() -> None:
    linked, ended = False, []
    arrivals = ArrivalWait(lambda: linked, 10.0, asyncio.get_running_loop().time)

    async def arrive(number: int) -> None:
        await arrivals.wait(None)
        ended.append(number)

    tasks = [asyncio.create_task(arrive(number)) for number in range(200)]
    await until(lambda: len(arrivals) == len(tasks))
    linked = True
    arrivals.update()
    await asyncio.gather(*tasks)
    assert ended == list(range(200))
    assert not len(arrivals)
