"""Several outputs, log-probabilities and echoes through the real gateway, with scripted workers."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import decode_pb2, work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import DIGEST, collect, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, delivered

ANSWERS = ["Paris, of course.", "It is Paris 😀!", "London? No: Paris."]


@pytest.fixture
def answers(bundled: ServedModel) -> list[list[int]]:
    return [bundled.tokenizer.encode(answer) for answer in ANSWERS]


def step(
    worker: ScriptedDecode, work: work_pb2.Work, tokens: list[work_pb2.Tokens], ended: object = ()
) -> None:
    for item in tokens:
        item.id.CopyFrom(work.id)
    worker.say(step=decode_pb2.StepBatch(tokens=tokens, ended=ended))  # type: ignore[arg-type]


def tokens_of(choice: int, index: int, ids: list[int], logprob: float | None = None) -> work_pb2.Tokens:
    scores = [] if logprob is None else [score(logprob)] * len(ids)
    return work_pb2.Tokens(choice=choice, index=index, token_ids=ids, scores=scores)


def score(logprob: float, *top: tuple[int, float]) -> work_pb2.Score:
    alternatives = [work_pb2.Alternative(token_id=i, logprob=p) for i, p in top]
    return work_pb2.Score(logprob=logprob, rank=1, top=alternatives)


def finished(work: work_pb2.Work, choice: int) -> decode_pb2.DecodeEnded:
    return decode_pb2.DecodeEnded(id=work.id, choice=choice, finished=work_pb2.FINISH_REASON_LENGTH)


def preempted(work: work_pb2.Work, choice: int) -> decode_pb2.DecodeEnded:
    return decode_pb2.DecodeEnded(id=work.id, choice=choice, preempted={})


def texts(messages: list[pb.GenerateResponse]) -> dict[int, str]:
    found: dict[int, str] = {}
    for message in messages:
        for output in message.outputs:
            found[output.index] = found.get(output.index, "") + output.text
    return found


def stepping(answers: list[list[int]]) -> object:
    """Return a script that sends one token of each choice a step."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        start = delivered(work)
        for index in range(start, max(map(len, answers))):
            tokens = [
                tokens_of(c, index, answers[c][index : index + 1])
                for c in work.choices
                if index < len(answers[c])
            ]
            ended = [finished(work, c) for c in work.choices if index == len(answers[c]) - 1]
            step(worker, work, tokens, ended)
            await asyncio.sleep(0.005)

    return script


async def test_each_choice_has_its_own_stream_and_end(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(stepping(answers))  # type: ignore[arg-type]
    async with running(bundled, redis_url, *workers) as stack:
        call = stack.stub.StreamGenerate(stack.request(sampling=pb.SamplingParams(n=3)))
        messages = await collect(call)
        whole = await stack.stub.Generate(stack.request(sampling=pb.SamplingParams(n=3)))
        await stack.until_idle()
        assert not any(w.outstanding for w in stack.core.worker_pool.registry.linked())
    assert texts(messages) == texts([whole]) == dict(enumerate(ANSWERS))
    ends = Counter(o.index for m in messages for o in m.outputs if o.finish_reason)
    assert ends == {0: 1, 1: 1, 2: 1}
    assert [len(m.outputs) for m in messages[:3]] == [3, 3, 3]  # what one step gave is one message
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert [m.HasField("prompt") for m in messages] == [True] + [False] * (len(messages) - 1)
    assert messages[-1].usage.completion_tokens == sum(map(len, answers))
    assert [o.index for o in whole.outputs] == [0, 1, 2]
    (attach, _) = [m for k, m in workers[1].sent if k == "attach"]
    (dispatch, _) = [m for k, m in workers[0].sent if k == "dispatch"]
    assert list(attach.choices) == list(dispatch.work.choices) == [0, 1, 2]


async def test_stop_string_ends_one_choice_alone(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(stepping(answers))  # type: ignore[arg-type]
    async with running(bundled, redis_url, prefill, decode) as stack:
        request = stack.request(sampling=pb.SamplingParams(n=3), stopping=pb.StoppingCriteria(stop=["?"]))
        messages = await collect(stack.stub.StreamGenerate(request))
        (cancel,) = await decode.wait_for("cancel")
        await stack.until_idle()
    assert list(cancel.choices) == [2]
    assert texts(messages) == {0: ANSWERS[0], 1: ANSWERS[1], 2: "London"}
    reasons = {o.index: o.finish_reason for m in messages for o in m.outputs if o.finish_reason}
    length, stop = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP
    assert reasons == {0: length, 1: length, 2: stop}


async def test_tokens_after_a_stop_string_in_one_step_are_neither_shown_nor_billed(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        first, second = answers[2][:3], answers[2][3:]
        step(worker, work, [tokens_of(0, 0, first), tokens_of(0, 3, second)], [finished(work, 0)])

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        shown = bundled.tokenizer.decode(answers[2][:3], True)
        request = stack.request(stopping=pb.StoppingCriteria(stop=[shown[-2:]]))
        messages = await collect(stack.stub.StreamGenerate(request))
        await stack.until_idle()
    assert texts(messages) == {0: shown[:-2]}
    assert messages[-1].outputs[0].finish_reason == pb.FINISH_REASON_STOP
    assert messages[-1].usage.completion_tokens == 3


async def test_preempted_choice_is_recomputed_while_the_others_continue(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt == 1:
            step(worker, work, [tokens_of(c, 0, answers[c][:2]) for c in range(3)], [preempted(work, 1)])
            await asyncio.sleep(0.05)
            late = [tokens_of(c, 2, answers[c][2:]) for c in (0, 2)]
            step(worker, work, [*late, tokens_of(1, 2, [0])], [finished(work, 0), finished(work, 2)])
            return
        assert list(work.choices) == [1]
        assert list(work.token_ids[work.prompt_tokens :]) == answers[1][:2]
        step(worker, work, [tokens_of(1, 2, answers[1][2:])], [finished(work, 1)])

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request(sampling=pb.SamplingParams(n=3))))
        await stack.until_idle()
    assert texts(messages) == dict(enumerate(ANSWERS))
    assert (messages[-1].timings.preemptions, messages[-1].timings.retries) == (1, 0)


async def test_failed_handoff_is_recomputed_for_all_choices_in_one_attempt(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt == 1:
            failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED)
            ended = [decode_pb2.DecodeEnded(id=work.id, choice=c, failure=failure) for c in range(2)]
            step(worker, work, [], ended)
        else:
            assert list(work.choices) == [0, 1]
            tokens = [tokens_of(c, 0, answers[c]) for c in range(2)]
            step(worker, work, tokens, [finished(work, c) for c in range(2)])

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request(sampling=pb.SamplingParams(n=2))))
        retries = stack.registry.get_sample_value("diptych_retries_total", {"cause": "kv_transfer_failed"})
    assert texts(messages) == dict(enumerate(ANSWERS[:2]))
    assert (messages[-1].timings.preemptions, messages[-1].timings.retries) == (0, 1)
    assert retries == 1


async def test_best_of_returns_the_likeliest_at_the_end_and_bills_all(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    logprobs = [-2.0, -0.5, -1.0]

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        assert work.sampling.logprobs == 0
        assert work.sampling.HasField("logprobs")
        for c in work.choices:
            step(worker, work, [tokens_of(c, 0, answers[c], logprobs[c])], [finished(work, c)])
            await asyncio.sleep(0.01)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        request = stack.request(sampling=pb.SamplingParams(n=2, best_of=3))
        (message,) = await collect(stack.stub.StreamGenerate(request))
        whole = await stack.stub.Generate(request)
    order = sorted(range(3), key=lambda c: -logprobs[c] * len(answers[c]))[:2]
    assert texts([message]) == texts([whole]) == {i: ANSWERS[c] for i, c in enumerate(order)}
    assert [o.index for o in message.outputs] == [0, 1]
    assert not any(o.logprobs for o in message.outputs)  # not requested
    assert message.usage.completion_tokens == sum(map(len, answers))


async def test_failed_best_of_is_unavailable(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        step(worker, work, [tokens_of(c, 0, answers[c], -1.0) for c in range(2)])
        worker.fail(work, work_pb2.FAILURE_REASON_PEER_LOST)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        request = stack.request(sampling=pb.SamplingParams(best_of=2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(request))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "WORKER_LOST"


async def test_best_of_ended_by_a_shutdown_is_unavailable(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    sent_some = asyncio.Event()

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        step(worker, work, [tokens_of(c, 0, answers[c][:2], -1.0) for c in range(2)])
        sent_some.set()

    workers = (ScriptedPrefill(), ScriptedDecode(script))
    async with running(bundled, redis_url, *workers, shutdown_timeout=0.3) as stack:
        call = stack.stub.StreamGenerate(stack.request(sampling=pb.SamplingParams(best_of=2)))
        await sent_some.wait()
        await stack.gateway.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "DRAINING"


async def test_logprobs_come_with_their_tokens_and_end_with_the_output(
    bundled: ServedModel, redis_url: str
) -> None:
    ids = bundled.tokenizer.encode("One 😀 two. Three")
    stop_at = next(i for i, t in enumerate(ids) if bundled.tokenizer.piece(t) == b".")
    top = [(ids[0], -0.1), (ids[1], -2.5)]

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        assert work.sampling.logprobs == 2
        scores = [score(-0.5 * i, *top) for i in range(len(ids))]
        for i in range(0, len(ids), 3):
            tokens = work_pb2.Tokens(id=work.id, index=i, token_ids=ids[i : i + 3], scores=scores[i : i + 3])
            worker.say(step=decode_pb2.StepBatch(tokens=[tokens]))

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        request = stack.request(
            response=pb.ResponseOptions(logprobs=2), stopping=pb.StoppingCriteria(stop=["."])
        )
        messages = await collect(stack.stub.StreamGenerate(request))
    outputs = [output for message in messages for output in message.outputs]
    assert all([t.token_id for t in o.logprobs] == list(o.token_ids) for o in outputs)
    records = [record for output in outputs for record in output.logprobs]
    assert [r.token_id for r in records] == ids[: stop_at + 1]
    assert [r.logprob for r in records] == [-0.5 * i for i in range(stop_at + 1)]
    for record in records:
        piece = bundled.tokenizer.piece(record.token_id)
        assert (record.utf8 or record.text.encode()) == piece
        assert bool(record.utf8) == ("\ufffd" in piece.decode(errors="replace"))
        assert [(t.token_id, round(t.logprob, 3), t.rank) for t in record.top] == [
            (ids[0], -0.1, 1),
            (ids[1], -2.5, 2),
        ]
    assert any(record.utf8 for record in records)


async def test_prompt_logprobs_and_echo_come_with_the_first_message(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    class Prefill(ScriptedPrefill):
        async def on_message(self, kind: str, message: object) -> None:
            if kind != "dispatch":
                return
            work = message.work  # type: ignore[attr-defined]
            count = work.prompt_tokens
            for first, last in ((1, 3), (3, count)):
                await asyncio.sleep(0.1)  # tokens come before
                scores = [score(-float(i)) for i in range(first, last)]
                self.say(prompt_scores=work_pb2.PromptScores(id=work.id, first_position=first, scores=scores))
            self.committed(work)

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        assert work.prompt_logprobs == 1
        step(worker, work, [tokens_of(0, 0, answers[0][:2])])
        step(worker, work, [tokens_of(0, 2, answers[0][2:])], [finished(work, 0)])

    prompt = "What is the capital of France?"
    ids = bundled.tokenizer.encode(prompt, add_special=True)
    async with running(bundled, redis_url, Prefill(), ScriptedDecode(script)) as stack:
        await stack.until_ready()
        options = pb.ResponseOptions(prompt_logprobs=1, echo_prompt=True)
        messages = await collect(stack.stub.StreamGenerate(stack.request(prompt, response=options)))
        whole = await stack.stub.Generate(stack.request(prompt, response=options))
    assert texts(messages) == texts([whole]) == {0: ANSWERS[0]}
    for info in (messages[0].prompt, whole.prompt):
        assert list(info.token_ids) == ids
        assert [t.token_id for t in info.logprobs] == ids
        assert not info.logprobs[0].HasField("logprob")
        assert [t.logprob for t in info.logprobs[1:]] == [-float(i) for i in range(1, len(ids))]


async def test_missing_prompt_logprobs_are_an_internal_error(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode()) as stack:
        request = stack.request("More than one token", response=pb.ResponseOptions(prompt_logprobs=0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(request))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_tokens_without_requested_logprobs_are_an_internal_error(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        step(worker, work, [tokens_of(0, 0, answers[0])], [finished(work, 0), finished(work, 1)])

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        request = stack.request(sampling=pb.SamplingParams(best_of=2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(request))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("how", ["cancel", "deadline", "time_limit", "by_id"])
async def test_every_end_cancels_all_choices_on_both_workers(
    bundled: ServedModel, redis_url: str, answers: list[list[int]], how: str
) -> None:
    prefill, decode = ScriptedPrefill(idle=True), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode) as stack:
        request = stack.request(request_id="several", sampling=pb.SamplingParams(n=3))
        if how == "time_limit":
            request.stopping.time_limit.CopyFrom(Duration(seconds=2))
        call = stack.stub.StreamGenerate(request, timeout=2.5 if how == "deadline" else None)
        (work,) = await decode.wait_for("attach")
        step(decode, work, [tokens_of(c, 0, answers[c][:2]) for c in range(3)])
        await call.read()
        if how == "cancel":
            call.cancel()
        elif how == "by_id":
            await stack.stub.CancelRequest(pb.CancelRequestRequest(request_id="several"))
        if how in ("time_limit", "by_id"):
            last = (await collect(call))[-1]
            reason = pb.FINISH_REASON_TIME_LIMIT if how == "time_limit" else pb.FINISH_REASON_CANCELLED
            assert [o.finish_reason for o in last.outputs] == [reason] * 3
            assert last.usage.completion_tokens == 6
        (to_decode,), (to_prefill,) = await decode.wait_for("cancel"), await prefill.wait_for("cancel")
        await stack.until_idle()
    assert list(to_decode.choices) == list(to_prefill.choices) == []


async def test_stream_interval_counts_each_choice_alone(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(stepping(answers))  # type: ignore[arg-type]
    async with running(bundled, redis_url, *workers) as stack:
        request = stack.request(
            sampling=pb.SamplingParams(n=2), response=pb.ResponseOptions(stream_interval=3)
        )
        messages = await collect(stack.stub.StreamGenerate(request))
    for choice in range(2):
        sizes = [len(o.token_ids) for m in messages for o in m.outputs if o.index == choice]
        assert sizes[0] == 1
        assert all(size >= 3 for size in sizes[1:-1])
        assert sum(sizes) == len(answers[choice])


async def test_choices_start_as_room_comes(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, max_inflight=3) as stack:
        two = pb.SamplingParams(n=2)
        calls = [
            asyncio.ensure_future(collect(stack.stub.StreamGenerate(stack.request(sampling=two))))
            for _ in "ab"
        ]
        first, second = await decode.wait_for("attach", 2)
        queue = stack.core.gate.queue
        assert [list(first.choices), list(second.choices)] == [[0, 1], [0]]
        assert (queue.running, queue.sequences, queue.waiting) == (2, 3, 0)
        step(decode, second, [tokens_of(0, 0, answers[0])], [])
        step(decode, first, [tokens_of(c, 0, answers[c]) for c in range(2)], [finished(first, 0)])
        third = (await decode.wait_for("attach", 3))[-1]
        assert list(third.choices) == [1], "the place of a choice that ended is the next one's"
        assert third.id.request_id == second.id.request_id
        step(decode, first, [], [finished(first, 1)])
        step(decode, second, [], [finished(second, 0)])
        step(decode, third, [tokens_of(1, 0, answers[1])], [finished(third, 1)])
        for call in calls:
            assert texts(await call) == dict(enumerate(ANSWERS[:2]))
        await stack.until_idle()


async def test_late_choice_without_a_worker_waits_for_one(
    bundled: ServedModel, redis_url: str, answers: list[list[int]]
) -> None:
    """Other choices of its request have sent output: it must not end as a request that can be replayed."""
    prefill, decode, later = ScriptedPrefill(), ScriptedDecode(), ScriptedDecode()
    async with running(bundled, redis_url, prefill, decode, max_inflight=1) as stack:
        call = asyncio.ensure_future(
            collect(stack.stub.StreamGenerate(stack.request(sampling=pb.SamplingParams(n=2))))
        )
        (first,) = await decode.wait_for("attach")
        assert list(first.choices) == [0]
        step(decode, first, [tokens_of(0, 0, answers[0])], [])
        await until(lambda: not stack.core.gate.queue.waiting_tokens)
        step(decode, first, [], [finished(first, 0)])
        await decode.wait_for("attach", 2)
        await decode.close()
        await later.start(redis_url, DIGEST)
        (third,) = await later.wait_for("attach")
        assert list(third.choices) == [1]
        step(later, third, [tokens_of(1, 0, answers[1])], [finished(third, 1)])
        assert texts(await call) == dict(enumerate(ANSWERS[:2]))
        await stack.until_idle()
        await later.close()
