"""Requests through the real gateway over real gRPC, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from diptych.runtime.block_hash import block_keys, namespace_key
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway import limits
from gateway.access.access import DEFAULT_TENANT
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import (
    DIGEST,
    SECRET,
    Stack,
    collect,
    ids_of,
    reason_of,
    running,
    text_of,
    until,
)
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering, delivered

ANSWER = "The capital of France is Paris, a city of light. Naïve café 😀!"


@pytest.fixture
def answer(bundled: ServedModel) -> list[int]:
    return bundled.tokenizer.encode(ANSWER)


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


async def test_stream_has_text_ids_usage_and_timings(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    times = work_pb2.PhaseTimes(
        prefill_queue=Duration(nanos=1_000_000),
        grant_wait=Duration(nanos=2_000_000),
        prefill=Duration(nanos=30_000_000),
        kv_send=Duration(nanos=4_000_000),
        kv_receive=Duration(nanos=5_000_000),
        decode_queue=Duration(nanos=6_000_000),
        decode=Duration(nanos=70_000_000),
        kv_bytes_transferred=99,
    )

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, answer[:1], cached_tokens=1)
        for index, token in enumerate(answer[1:], 1):
            worker.tokens(work, index, [token])
        worker.finish(work, times)

    prefill, decode = ScriptedPrefill(), ScriptedDecode(script)
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request(request_id="my-id"))
        messages = await collect(call)
        await stack.until_idle()
        trailers = dict(await call.trailing_metadata())

    assert text_of(messages) == ANSWER
    assert ids_of(messages) == answer
    first, last = messages[0], messages[-1]
    prompt_tokens = len(bundled.tokenizer.encode("Hello", add_special=True))
    assert (first.request_id, first.model) == ("my-id", bundled.card.name)
    assert (first.prompt.token_count, first.prompt.cached_token_count) == (prompt_tokens, 1)
    assert all(not m.model and not m.request_id for m in messages[1:])
    assert last.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == len(answer)
    assert last.usage.cached_prompt_tokens == 1
    assert last.timings.prefill.ToMilliseconds() == 30
    assert last.timings.kv_transfer.ToMilliseconds() == 9
    assert last.timings.decode_queue.ToMilliseconds() == 6
    assert last.timings.decode.ToMilliseconds() == 70
    assert last.timings.queue.ToMilliseconds() >= 3
    assert last.timings.kv_bytes_transferred == 99
    assert 0 < last.timings.time_to_first_token.ToNanoseconds() <= last.timings.total.ToNanoseconds()
    assert trailers["x-request-id"] == "my-id"

    (attach,) = [m for k, m in decode.sent if k == "attach"]
    (dispatch,) = [m for k, m in prefill.sent if k == "dispatch"]
    assert dispatch.work == attach
    assert dispatch.decode_address == decode.address
    assert dispatch.decode_incarnation == decode.incarnation
    assert attach.stopping.max_tokens == 8192 - prompt_tokens
    assert set(bundled.card.eos_token_ids) <= set(attach.stopping.stop_token_ids)
    assert len(attach.cache_namespace) == 32
    assert not attach.HasField("time_left")
    # The prefill worker may be cancelled: its terminal message, on another stream, may come after decode's.
    assert [k for k, _ in decode.sent if k == "cancel"] == []


async def test_generate_returns_one_message(bundled: ServedModel, redis_url: str, answer: list[int]) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, *workers) as stack:
        response = await stack.stub.Generate(stack.request())
    assert text_of([response]) == ANSWER
    assert response.usage.completion_tokens == len(answer)
    assert response.prompt.token_count > 0
    assert response.timings.HasField("total")


async def test_first_token_does_not_wait_for_the_handoff(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (dispatch,) = await prefill.wait_for("dispatch")
        prefill.first(dispatch.work, answer[0], cached_tokens=1)
        first = await call.read()
        assert list(first.outputs[0].token_ids) == answer[:1]
        assert first.prompt.cached_token_count == 1
        prefill.committed(dispatch.work)
        await answering(answer)(decode, dispatch.work)
        rest = await collect(call)
    assert text_of([first, *rest]) == ANSWER
    assert rest[-1].usage.completion_tokens == len(answer)


async def test_client_cancellation_reaches_both_workers(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (dispatch,) = await prefill.wait_for("dispatch")
        (attach,) = await decode.wait_for("attach")
        decode.tokens(attach, 0, answer[:2])
        await call.read()
        call.cancel()
        (to_prefill,) = await prefill.wait_for("cancel")
        (to_decode,) = await decode.wait_for("cancel")
        await stack.until_idle()
    assert to_prefill.id == to_decode.id == dispatch.work.id


async def test_deadline_reaches_the_workers_and_then_cancels_on_both(
    bundled: ServedModel, redis_url: str
) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        error = await failure(stack.stub.StreamGenerate(stack.request(), timeout=1.5))
        (attach,) = await decode.wait_for("attach")
        await prefill.wait_for("cancel")
        await decode.wait_for("cancel")
        await stack.until_idle()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < attach.time_left.ToNanoseconds() / 1e9 < 1.51  # gRPC sends 1 to 10 s rounded up to 10 ms


async def test_time_limit_finishes_with_partial_output(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, answer[:3])

    prefill, decode = ScriptedPrefill(), ScriptedDecode(script)
    limit = pb.StoppingCriteria(time_limit=Duration(nanos=300_000_000))
    async with running(bundled, redis_url, prefill, decode) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request(stopping=limit)))
        await decode.wait_for("cancel")
    assert messages[-1].outputs[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert messages[-1].usage.completion_tokens == 3
    assert ids_of(messages) == answer[:3]


async def test_stop_string_ends_the_stream_and_the_overrun_is_not_billed(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill_times = work_pb2.PhaseTimes(prefill=Duration(nanos=20_000_000))

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, answer[:1], times=prefill_times)
        worker.tokens(work, 1, answer[1:])  # far beyond the stop, and never an end

    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode(script)
    async with running(bundled, redis_url, prefill, decode) as stack:
        request = stack.request(stopping=pb.StoppingCriteria(stop=["Paris, a"]))
        messages = await collect(stack.stub.StreamGenerate(request))
        await decode.wait_for("cancel")
        await prefill.wait_for("cancel")
        await stack.until_idle()
    last = messages[-1]
    assert text_of(messages) == "The capital of France is "
    assert last.outputs[0].finish_reason == pb.FINISH_REASON_STOP
    assert last.outputs[0].stop_text == "Paris, a"
    assert last.timings.prefill.ToMilliseconds() == 20
    billed = last.usage.completion_tokens
    assert bundled.tokenizer.decode(answer[:billed], True).endswith("Paris, a")
    assert ids_of(messages) == answer[:billed]


async def test_stop_token_is_billed_and_not_shown(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    stop = bundled.tokenizer.encode("!")[0]

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, [*answer[:4], stop])
        worker.ended(work, finished=work_pb2.FINISH_REASON_STOP)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        for include in (False, True):
            stopping = pb.StoppingCriteria(stop_token_ids=[stop], include_stop_in_output=include)
            messages = await collect(stack.stub.StreamGenerate(stack.request(stopping=stopping)))
            assert text_of(messages) == bundled.tokenizer.decode(answer[:4], True) + "!" * include
            assert messages[-1].outputs[0].stop_token_id == stop
            assert messages[-1].usage.completion_tokens == 5


async def test_preemption_does_not_change_the_output(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        start, attempt = delivered(work), work.id.attempt
        assert list(work.token_ids[work.prompt_tokens :]) == answer[:start]
        worker.tokens(work, max(start - 1, 0), answer[max(start - 1, 0) : start + 3])  # one of them twice
        if attempt < 4:
            worker.ended(work, preempted={})
            worker.tokens(work, start + 3, [0])  # a late word of a dead attempt
        else:
            worker.tokens(work, start + 3, answer[start + 3 :])
            worker.finish(work)

    prefill, decode = ScriptedPrefill(), ScriptedDecode(script)
    async with running(bundled, redis_url, prefill, decode) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request()))
        await stack.until_idle()
        retries = stack.registry.get_sample_value("diptych_retries_total", {"cause": "preempted"})
    assert (text_of(messages), ids_of(messages)) == (ANSWER, answer)
    assert messages[-1].timings.preemptions == 3
    assert retries == 3
    works = [m for k, m in decode.sent if k == "attach"]
    assert [w.id.attempt for w in works] == [1, 2, 3, 4]
    assert [w.reserve_worst_case for w in works] == [False, False, True, True]
    assert len({w.sampling.seed for w in works}) == 1


async def test_worker_without_heartbeat_is_lost_within_seconds(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, worker_wait_timeout=0) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        await decode.wait_for("attach")
        started = time.monotonic()
        decode.silent = True
        error = await failure(call)
        assert time.monotonic() - started < 10
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        decode.silent = False
        await stack.until_ready()  # linked again


async def test_failed_handoff_is_recomputed_once(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    failures = 1

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt <= failures:
            worker.fail(work, work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED)
        else:
            await answering(answer)(worker, work)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request()))
        assert text_of(messages) == ANSWER
        assert (messages[-1].timings.retries, messages[-1].timings.preemptions) == (1, 0)
        failures = 2
        error = await failure(stack.stub.StreamGenerate(stack.request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "KV_TRANSFER_FAILED"


async def test_draining_worker_gets_no_new_request(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def refuse(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.fail(work, work_pb2.FAILURE_REASON_DRAINING)

    workers = ScriptedPrefill(), ScriptedDecode(refuse), ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, *workers) as stack:
        await until(lambda: len(stack.core.worker_pool.registry.linked()) == 3)
        for _ in range(8):  # whichever comes first
            assert text_of(await collect(stack.stub.StreamGenerate(stack.request()))) == ANSWER


async def test_gap_in_token_positions_is_an_internal_error(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, answer[:1])
        worker.tokens(work, 2, answer[2:3])

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        error = await failure(stack.stub.StreamGenerate(stack.request()))
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_prompt_longer_than_every_pool_is_refused(bundled: ServedModel, redis_url: str) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(total_blocks=4)
    async with running(bundled, redis_url, *workers) as stack:
        fits = pb.StoppingCriteria(max_tokens=63)
        call = stack.stub.StreamGenerate(stack.request("x", stopping=fits))
        (attach,) = await workers[1].wait_for("attach")
        assert attach.stopping.max_tokens + attach.prompt_tokens <= 64
        call.cancel()
        error = await failure(
            stack.stub.StreamGenerate(stack.request("x", stopping=pb.StoppingCriteria(max_tokens=64)))
        )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "CONTEXT_LENGTH_EXCEEDED"


async def test_no_ready_worker_is_unavailable_with_a_retry_hint(bundled: ServedModel, redis_url: str) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, decode, worker_wait_timeout=0) as stack:
        error = await failure(stack.stub.StreamGenerate(stack.request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "NO_READY_WORKER"
        assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
        assert not stack.gateway.ready


async def test_queue_keeps_priority_order_and_refuses_above_its_bound(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, max_inflight=1, max_queued_tokens=60) as stack:
        running_call = asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request())))
        (first,) = await decode.wait_for("attach")
        low = asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request(priority=0))))
        await until(lambda: stack.core.gate.queue.waiting == 1)
        high = asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request("Hi", priority=5))))
        await until(lambda: stack.core.gate.queue.waiting == 2)
        error = await failure(stack.stub.StreamGenerate(stack.request("one more than fits " * 4)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(error) == "QUEUE_FULL"
        assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
        for count, call in enumerate((running_call, high, low), 1):
            work = (await decode.wait_for("attach", count))[-1]
            decode.tokens(work, 0, answer)
            decode.finish(work)
            assert text_of(await call) == ANSWER
        assert first.priority == 0
        await stack.until_idle()


async def test_duplicate_live_id_is_refused_and_cancel_by_id_works(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        call = stack.stub.StreamGenerate(stack.request(request_id="same"))
        (work,) = await decode.wait_for("attach")
        decode.tokens(work, 0, answer[:2])
        await call.read()
        error = await failure(stack.stub.StreamGenerate(stack.request(request_id="same")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        cancel = pb.CancelRequestRequest(request_id="same")
        assert (await stack.stub.CancelRequest(cancel)).was_running
        messages = await collect(call)
        assert messages[-1].outputs[0].finish_reason == pb.FINISH_REASON_CANCELLED
        await decode.wait_for("cancel")
        await stack.until_idle()
        assert not (await stack.stub.CancelRequest(cancel)).was_running


async def test_router_sends_a_prompt_to_the_worker_with_its_prefix(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:

    prompt = "A long prefix that many requests share. " * 20
    ids = bundled.tokenizer.encode(prompt, add_special=True)
    namespace = namespace_key(bytes.fromhex(SECRET), tenant="", salt="", model_digest=DIGEST, kv_dtype="fp32")
    owner, others = ScriptedDecode(answering(answer)), [ScriptedDecode(answering(answer)) for _ in range(3)]
    owner.keys = block_keys(namespace, ids, 16)
    async with running(bundled, redis_url, ScriptedPrefill(), owner, *others) as stack:
        await until(lambda: len(stack.core.worker_pool.registry.linked()) == 5)
        await until(lambda: bool(stack.gateway.mirror.prefix_hits(owner.keys)))
        for _ in range(4):
            await collect(stack.stub.StreamGenerate(stack.request(prompt)))
        assert len([k for k, _ in owner.sent if k == "attach"]) == 4
        salted = stack.request(prompt, cache=pb.CacheOptions(salt="other"))
        await collect(stack.stub.StreamGenerate(salted))
        decisions = stack.registry.get_sample_value(
            "diptych_route_decisions_total", {"policy": "cost", "reason": "prefix"}
        )
    assert decisions == 4


async def test_work_ids_differ_for_repeated_request_ids(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, *workers) as stack:
        for _ in range(2):
            await collect(stack.stub.StreamGenerate(stack.request(request_id="again")))
        await stack.until_idle()
    first, second = [m for k, m in workers[1].sent if k == "attach"]
    assert first.id.request_id != second.id.request_id


async def test_concurrent_streams_and_random_cancels_leave_nothing_behind(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(answering(answer, pause_s=0.002))
    async with running(bundled, redis_url, prefill, decode) as stack:

        async def one(number: int) -> None:
            call = stack.stub.StreamGenerate(stack.request())
            if number % 3:
                assert text_of(await collect(call)) == ANSWER
                return
            await asyncio.sleep(0.003 * (number % 20))
            call.cancel()

        await asyncio.gather(*map(one, range(120)))
        await stack.until_idle()
        assert not any(w.outstanding for w in stack.core.worker_pool.registry.linked())


async def test_drain_lets_running_requests_finish_and_refuses_new_ones(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, shutdown_timeout=3) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (work,) = await decode.wait_for("attach")
        drain = asyncio.ensure_future(stack.gateway.drain())
        await stack.until_ready(False)
        error = await failure(stack.stub.StreamGenerate(stack.request()))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        decode.tokens(work, 0, answer)
        decode.finish(work)
        assert text_of(await collect(call)) == ANSWER
        await asyncio.wait_for(drain, 1)


async def test_drain_waits_for_long_texts_in_the_tokenizer_pool(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    """Start a call whose text waits in the pool: it is no request yet."""
    read, turn = threading.Event(), pb.TokenizeRequest(text="a" * limits.INLINE_PARSE_BYTES)
    workers = ScriptedPrefill(), ScriptedDecode(answering(answer))
    settings = {"shutdown_timeout": 30, "reuse_port": True}  # with a successor, nothing is refused
    async with running(bundled, redis_url, *workers, **settings) as stack:
        before_it = asyncio.create_task(
            stack.gateway.tokenizer_pool.run(turn, DEFAULT_TENANT, lambda: read.wait(60))
        )
        long = stack.request("a " * limits.INLINE_PARSE_BYTES, stopping={"max_tokens": len(answer)})
        call = asyncio.ensure_future(collect(stack.stub.StreamGenerate(long)))
        await until(lambda: stack.gateway.calls.running)
        drain = asyncio.ensure_future(stack.gateway.drain())
        await asyncio.sleep(0.2)
        assert not drain.done()
        read.set()
        await before_it
        assert (await call)[-1].usage.completion_tokens == len(answer)
        await asyncio.wait_for(drain, 30)


async def test_stream_gets_shutdown_status_after_the_grace_period(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, ScriptedPrefill(), decode, shutdown_timeout=0.1) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        (work,) = await decode.wait_for("attach")
        decode.tokens(work, 0, answer[:3])
        await call.read()
        await stack.gateway.drain()
        error = await failure(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.ABORTED, "SHUTTING_DOWN")


async def test_waiting_request_gets_a_status_after_the_grace_period(
    bundled: ServedModel, redis_url: str
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    stack: Stack
    async with running(bundled, redis_url, prefill, decode, shutdown_timeout=0.1) as stack:
        call = stack.stub.StreamGenerate(stack.request())
        await decode.wait_for("attach")
        await stack.gateway.drain()
        error = await failure(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await decode.wait_for("cancel")


async def test_cached_tokens_of_a_resumed_request_are_bounded_by_its_prompt(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    """Resume after delivered tokens, which are cached as well but are no part of the client's prompt."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, delivered(work), answer[delivered(work) :], cached_tokens=len(work.token_ids) - 1)
        worker.finish(work)

    workers = ScriptedPrefill(), ScriptedDecode(script)
    async with running(bundled, redis_url, *workers) as stack:
        request = stack.request(stopping={"max_tokens": len(answer), "ignore_eos": True})
        opened = (await collect(stack.stub.StreamGenerate(request)))[0]
        resumed = pb.GenerateRequest(resume_token=opened.resume_token, received_token_ids=answer[:-1])
        resumed.MergeFrom(request)
        usage = (await collect(stack.stub.StreamGenerate(resumed)))[-1].usage
    assert usage.completion_tokens == len(answer)
    assert 0 < usage.cached_prompt_tokens <= usage.prompt_tokens < len(answer)
