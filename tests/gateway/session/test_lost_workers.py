"""Recovery from workers that die under a request: the real gateway over real gRPC, with scripted workers."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import Stack, collect, ids_of, reason_of, running, text_of, until
from tests.gateway.scripted_workers import (
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedWorker,
    answering,
    delivered,
)

ANSWER = "The capital of France is Paris, a city of light. Naïve café 😀!"


@pytest.fixture
def answer(bundled: ServedModel) -> list[int]:
    return bundled.tokenizer.encode(ANSWER)


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


async def worker_with_request(*workers: ScriptedWorker) -> ScriptedWorker:
    """Return the worker that a request was sent to."""
    await until(lambda: any(kind in ("attach", "dispatch") for w in workers for kind, _ in w.sent))
    return next(w for w in workers if any(kind in ("attach", "dispatch") for kind, _ in w.sent))


async def linked(stack: Stack, count: int) -> None:
    await until(lambda: len(stack.core.worker_pool.registry.linked()) == count)


@pytest.mark.parametrize("tokens_first", [0, 3])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_lost_worker_costs_no_token(
    bundled: ServedModel, redis_url: str, answer: list[int], victim: str, tokens_first: int
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        assert list(work.token_ids[work.prompt_tokens :]) == answer[: delivered(work)]
        if work.id.attempt > 1:
            await answering(answer)(worker, work)
        elif tokens_first:
            worker.tokens(work, 0, answer[:tokens_first])

    prefills = [ScriptedPrefill(idle=True), ScriptedPrefill(idle=True)]
    decodes = [ScriptedDecode(script), ScriptedDecode(script)]
    async with running(bundled, redis_url, *prefills, *decodes) as stack:
        await linked(stack, 4)
        call = stack.stub.StreamGenerate(stack.request())
        prefill, decode = await worker_with_request(*prefills), await worker_with_request(*decodes)
        first = [await call.read()] if tokens_first else []
        started = time.monotonic()
        await (prefill if victim == "prefill" else decode).kill()
        messages = [*first, *await collect(call)]
        took = time.monotonic() - started
        await (decode if victim == "prefill" else prefill).wait_for("cancel")
        await stack.until_idle()
        retries = stack.registry.get_sample_value("diptych_retries_total", {"cause": "worker_lost"})
    assert (text_of(messages), ids_of(messages)) == (ANSWER, answer)
    assert messages[-1].timings.retries == 1
    assert retries == 1
    assert took < 10  # a connection that broke says so: no silence is waited for


async def test_request_waits_for_the_restart_of_the_only_worker(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    again = ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (work,) = await decode.wait_for("attach")
        decode.tokens(work, 0, answer[:3])
        first = await call.read()
        await decode.kill()
        await asyncio.sleep(0.3)
        again.worker_id = decode.worker_id  # as a supervisor restarts it
        await again.start(redis_url, "d" * 64)
        messages = [first, *await collect(call)]
        await again.close()
    assert (text_of(messages), ids_of(messages)) == (ANSWER, answer)


@pytest.mark.parametrize("tokens_first", [0, 3])
async def test_wait_for_a_worker_expires(
    bundled: ServedModel, redis_url: str, answer: list[int], tokens_first: int
) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, worker_wait_timeout=0.3) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (work,) = await decode.wait_for("attach")
        if tokens_first:
            decode.tokens(work, 0, answer[:tokens_first])
            await call.read()
        started = time.monotonic()
        await decode.kill()
        error = await failure(call)
        took = time.monotonic() - started
        await prefill.wait_for("cancel")
        await stack.until_idle()
    assert error.code() is (grpc.StatusCode.ABORTED if tokens_first else grpc.StatusCode.UNAVAILABLE)
    assert reason_of(error) == ("WORKER_LOST" if tokens_first else "NO_READY_WORKER")
    assert 0.3 <= took < 10


async def test_request_that_kills_two_workers_gets_no_third(bundled: ServedModel, redis_url: str) -> None:
    async def die(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        await worker.kill()

    decodes = [ScriptedDecode(die) for _ in range(3)]
    async with running(bundled, redis_url, ScriptedPrefill(), *decodes, worker_wait_timeout=0.5) as stack:
        await linked(stack, 4)
        error = await failure(stack.stub.StreamGenerate(stack.request()))
        await stack.until_idle()
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert sorted(len([1 for kind, _ in d.sent if kind == "attach"]) for d in decodes) == [0, 1, 1]


async def test_deaths_confirmed_by_a_supervisor_end_the_request_at_once(
    bundled: ServedModel, redis_url: str
) -> None:
    async def die(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        await worker.kill()

    first, second, third = (ScriptedDecode(die) for _ in range(3))
    async with running(bundled, redis_url, ScriptedPrefill(), first, worker_wait_timeout=300.0) as stack:
        await linked(stack, 2)
        call = stack.stub.StreamGenerate(stack.request())
        await first.wait_for("attach")
        second.replaces = first.worker_id
        await second.start(redis_url, "d" * 64)
        await second.wait_for("attach")
        await asyncio.sleep(0.5)
        assert not call.done()  # it waits until the deaths are confirmed
        third.replaces = f"{first.worker_id},{second.worker_id}"
        await third.start(redis_url, "d" * 64)
        error = await failure(call)
        await stack.until_idle()
        await second.close()
        await third.close()
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert not [kind for kind, _ in third.sent if kind == "attach"]


async def test_unary_answer_survives_a_lost_worker(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt == 1:
            worker.tokens(work, 0, answer[:3])
            await asyncio.sleep(0.05)
            await worker.kill()
        else:
            await answering(answer)(worker, work)

    workers = ScriptedPrefill(), ScriptedDecode(script), ScriptedDecode(script)
    async with running(bundled, redis_url, *workers) as stack:
        await linked(stack, 3)
        message = await stack.stub.Generate(stack.request())
    assert list(message.outputs[0].token_ids) == answer


async def test_tokens_before_an_unrecovered_loss_are_delivered(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, answer[:1])
        worker.tokens(work, 1, answer[1:4])
        worker.fail(work, work_pb2.FAILURE_REASON_PEER_LOST)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        received: list[int] = []
        while len(received) < 4:
            received += (await call.read()).outputs[0].token_ids
        error = await failure(call)
    assert received == answer[:4]
    assert error.code() is grpc.StatusCode.ABORTED


async def test_stop_token_at_the_limit_is_a_stop_when_the_terminal_message_is_lost(
    bundled: ServedModel, redis_url: str
) -> None:
    """The prefill worker sends the only token that is allowed, and the decode worker never takes over."""
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    eos = bundled.card.eos_token_ids[0]
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.Generate(stack.request(stopping=pb.StoppingCriteria(max_tokens=1)))
        (dispatch,) = await prefill.wait_for("dispatch")
        prefill.first(dispatch.work, eos)
        await asyncio.sleep(0.1)
        decode.ended(dispatch.work, preempted={})
        output = (await call).outputs[0]
        await stack.until_idle()
    assert output.finish_reason == pb.FINISH_REASON_STOP
    assert output.stop_token_id == eos


async def test_failed_compute_is_retried_once_uncached(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    failures = 1

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt <= failures:
            worker.tokens(work, 0, answer[:2])
            worker.fail(work, work_pb2.FAILURE_REASON_COMPUTE_FAILED)
        else:
            assert not work.cache_read
            await answering(answer)(worker, work)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        assert ids_of(await collect(stack.stub.StreamGenerate(stack.request()))) == answer
        failures = 2
        error = await failure(stack.stub.StreamGenerate(stack.request()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
