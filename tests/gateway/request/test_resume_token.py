"""Going on with a stream that broke, at another gateway: the token, and both gateways over real gRPC."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.parameters import Sampling
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from gateway.output.output_stream import OutputStream
from gateway.reasoning.harmony import HarmonyReasoning
from gateway.reasoning.request_reasoning import RequestReasoning
from gateway.reasoning.splitter import Start
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import LIFETIME_S, ResumeTokens
from gateway.tools.tool import Tool, Toolbox
from tests.gateway.failing_calls import told
from tests.gateway.running_gateway import Stack, collect, ids_of, running, text_of
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering, delivered

ANSWER = "The capital of France is Paris, a city of light. Naïve café 😀!"
SAMPLING = Sampling(0.7, 0.9, 40, 0.0, 0.1, 0.2, 1.1, 12345, {7: 1.5}, (1, 2, 7), ((3,),))
REQUEST = ParsedRequest(
    request_id="r1",
    model="small",
    prompt_ids=(1, 2, 3),
    sampling=SAMPLING,
    max_tokens=None,
    min_tokens=0,
    stop=("end",),
    stop_token_ids=(9,),
    ignore_eos=False,
    include_stop=False,
    time_limit_s=None,
    want_text=True,
    want_token_ids=True,
    skip_special=True,
    stream_interval=1,
    want_timings=True,
    salt="",
    cache_read=True,
    cache_write=True,
    priority=0,
    session_id="",
)


TENANT = "acme"


def tokens(secret: bytes = b"s" * 32, model: str = "m", now: float = 1e9) -> ResumeTokens:
    return ResumeTokens(secret, model, wall_clock=lambda: now)


def fault_of(open_it: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        open_it()
    (violation,) = caught.value.violations
    assert violation.field == "resume_token"
    return violation.description


def test_a_token_says_what_was_resolved_and_nothing_more() -> None:
    token = tokens().issue(REQUEST, 77, TENANT)
    opened = tokens(now=1e9 + LIFETIME_S - 1).open(token)
    assert (opened.seed, opened.max_tokens) == (12345, 77)
    tokens().check(opened, REQUEST, TENANT)
    assert len(token) == 71
    assert tokens().issue(replace(REQUEST, prompt_ids=tuple(range(5000))), 77, TENANT)[:27] == token[:27]


@given(st.integers(0, 52), st.integers(1, 255))
def test_altered_token_is_refused(place: int, flip: int) -> None:
    data = bytearray(base64.urlsafe_b64decode(tokens().issue(REQUEST, 77, TENANT) + "="))
    data[place] ^= flip
    altered = base64.urlsafe_b64encode(bytes(data)).rstrip(b"=").decode()
    assert fault_of(lambda: tokens().open(altered)) == "is not a token of this service"


@given(st.text(max_size=80))
def test_other_text_is_no_token(text: str) -> None:
    assert fault_of(lambda: tokens().open(text)) == "is not a token of this service"


def test_token_of_another_fleet_or_too_old_is_refused() -> None:
    token = tokens().issue(REQUEST, 77, TENANT)
    assert fault_of(lambda: tokens(secret=b"t" * 32).open(token)) == "is not a token of this service"
    assert fault_of(lambda: tokens(now=1e9 + LIFETIME_S + 1).open(token)) == "has expired"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (1, 2, 4)},
        {"max_tokens": 5},
        {"stop": ("ende",)},
        {"skip_special": False},
        {"sampling": replace(SAMPLING, temperature=0.8)},
        {"sampling": replace(SAMPLING, seed=1)},
        {"sampling": replace(SAMPLING, logit_bias={7: 1.6})},
        {"model": "other"},
    ],
)
def test_token_of_another_request_is_refused(changes: dict[str, Any]) -> None:
    opened = tokens().open(tokens().issue(REQUEST, 77, TENANT))
    for service, request in ((tokens(), replace(REQUEST, **changes)), (tokens(model="n"), REQUEST)):
        assert "another" in fault_of(lambda s=service, r=request: s.check(opened, r, TENANT))


def test_token_is_bound_to_parallel_tool_calls() -> None:
    several = replace(REQUEST, tools=Toolbox((Tool("f"),)))
    one = replace(several, tools=Toolbox((Tool("f"),), single=True))
    opened = tokens().open(tokens().issue(one, 77, TENANT))
    tokens().check(opened, one, TENANT)
    assert "another" in fault_of(lambda: tokens().check(opened, several, TENANT))


def test_token_is_bound_to_the_place_where_the_output_begins() -> None:
    form = HarmonyReasoning((1, 2, 3, 4), None)  # type: ignore[arg-type]
    inside = replace(REQUEST, reasoning=RequestReasoning(form, Start.OPEN))
    opened = tokens().open(tokens().issue(inside, 77, TENANT))
    tokens().check(opened, inside, TENANT)
    for other in (REQUEST, replace(REQUEST, reasoning=RequestReasoning(form, Start.BEFORE))):
        assert "another" in fault_of(lambda request=other: tokens().check(opened, request, TENANT))


def test_token_ignores_fields_without_effect_on_the_output() -> None:
    opened = tokens().open(tokens().issue(REQUEST, 77, TENANT))
    tokens().check(
        opened, replace(REQUEST, request_id="r2", priority=3, time_limit_s=1.0, stream_interval=9), TENANT
    )


def test_an_output_is_restored_to_where_it_was() -> None:
    """Ids without text: a stop token in the middle is none that a client can have."""

    def fresh() -> OutputStream:
        return OutputStream(
            None,
            None,
            stop_ids=frozenset({9}),
            include_stop=False,
            min_tokens=0,
            interval=1,
            want_text=False,
            want_token_ids=True,
        )

    output = fresh()
    assert output.restore((1, 2, 3))
    assert (output.billed, output.pending, output.due) == (3, 0, False)
    assert fresh().restore((1, 9))
    assert not fresh().restore((9, 1))


# --- through the gateways ---------------------------------------------------------------------------------


@pytest.fixture
def answer(bundled: ServedModel) -> list[int]:
    return bundled.tokenizer.encode(ANSWER)


async def some_of(stack: Stack, request: pb.GenerateRequest, pieces: int) -> list[pb.GenerateResponse]:
    """The first messages of a stream that the client then leaves."""
    call = stack.stub.StreamGenerate(request)
    messages = [await call.read() for _ in range(pieces)]
    call.cancel()
    return messages


def resumed(request: pb.GenerateRequest, messages: list[pb.GenerateResponse]) -> pb.GenerateRequest:
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume_token = next(m.resume_token for m in reversed(messages) if m.resume_token)
    again.received_token_ids.extend(ids_of(messages))
    return again


@pytest.mark.parametrize("stop", [[], ["light"], ["ity of li"]])
async def test_pieces_of_two_gateways_are_the_whole(
    bundled: ServedModel, redis_url: str, answer: list[int], stop: list[str]
) -> None:
    """Broken after any message, and once more after one more: half a character, half a stop string."""
    decode = ScriptedDecode(answering(answer))
    async with (
        running(bundled, redis_url, ScriptedPrefill(), decode) as one,
        running(bundled, redis_url) as two,
    ):
        await two.until_ready()
        request = one.request(sampling={"temperature": 1.0}, stopping={"stop": stop})
        whole = await collect(one.stub.StreamGenerate(request))
        for pieces in range(1, len(whole), 2):
            decode.sent.clear()
            first = await some_of(one, request, pieces)
            last = await collect(two.stub.StreamGenerate(resumed(request, first)))
            both = first + last
            assert (text_of(both), ids_of(both)) == (text_of(whole), ids_of(whole)), pieces
            end = whole[-1].outputs[0]
            assert last[-1].outputs[0].finish_reason == end.finish_reason
            assert last[-1].outputs[0].stop_text == end.stop_text
            assert last[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
            seeds = {m.sampling.seed for kind, m in decode.sent if kind == "attach"}
            assert len(seeds) == 1
        twice = first + await some_of(two, resumed(request, first), 1)
        assert ids_of(twice + await collect(one.stub.StreamGenerate(resumed(request, twice)))) == ids_of(
            whole
        )


async def test_a_client_that_missed_only_the_end_gets_it_without_a_worker(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        await answering(answer)(worker, work)

    decode = ScriptedDecode(script)
    async with running(bundled, redis_url, ScriptedPrefill(), decode) as stack:
        request = stack.request(stopping={"max_tokens": len(answer)})
        messages = await collect(stack.stub.StreamGenerate(request))
        attached = len([1 for kind, _ in decode.sent if kind == "attach"])
        (end,) = await collect(stack.stub.StreamGenerate(resumed(request, messages)))
        assert (list(end.outputs[0].token_ids), end.outputs[0].text) == ([], "")
        assert end.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert end.usage.completion_tokens == len(answer)
        assert len([1 for kind, _ in decode.sent if kind == "attach"]) == attached
        await stack.until_idle()


async def test_whether_an_output_was_complete_at_its_last_token_only_a_worker_knows(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if delivered(work) < len(answer):
            worker.tokens(work, delivered(work), answer[delivered(work) :])
        worker.ended(work, finished=work_pb2.FINISH_REASON_STOP)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        structure = pb.StructuredOutput(regex="[^z]*z")
        request = stack.request(stopping={"max_tokens": len(answer)}, structured_output=structure)
        messages = await collect(stack.stub.StreamGenerate(request))
        (end,) = await collect(stack.stub.StreamGenerate(resumed(request, messages)))
        assert messages[-1].outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert end.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert (list(end.outputs[0].token_ids), end.outputs[0].text) == ([], "")
        assert end.usage.completion_tokens == len(answer)
        await stack.until_idle()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r, "resume_token", "A" * 71), "resume_token"),
        (lambda r: setattr(r, "resume_token", r.resume_token[:-2] + "AA"), "resume_token"),
        (lambda r: setattr(r, "text", "another prompt"), "resume_token"),
        (lambda r: setattr(r.stopping, "max_tokens", 3), "resume_token"),
        (lambda r: r.ClearField("resume_token"), "received_token_ids"),
        (lambda r: r.received_token_ids.append(10**6), "received_token_ids"),
        (lambda r: setattr(r.sampling, "n", 2), "sampling.n"),
        (lambda r: setattr(r.sampling, "beam_width", 2), "sampling.beam_width"),
    ],
)
async def test_what_is_refused_by_the_name_of_its_field(
    bundled: ServedModel, redis_url: str, answer: list[int], change: Any, field: str
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, *workers) as stack:
        request = stack.request()
        bad = resumed(request, await some_of(stack, request, 2))
        change(bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(bad))
    found = told(caught.value)
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(found.fields) == [field]


async def test_ids_after_the_end_of_the_output_are_refused(
    bundled: ServedModel, redis_url: str, answer: list[int]
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering(answer))
    async with running(bundled, redis_url, *workers) as stack:
        request = stack.request(stopping={"stop": ["Paris"]})
        bad = resumed(request, await some_of(stack, request, 1))
        bad.received_token_ids[:] = answer
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(bad))
        await stack.until_idle()
    assert list(told(caught.value).fields) == ["received_token_ids"]


@pytest.mark.parametrize(
    "fields", [{"sampling": {"n": 2}}, {"sampling": {"beam_width": 2}}, {"response": {"token_ids": False}}]
)
async def test_no_token_where_it_would_be_of_no_use(
    bundled: ServedModel, redis_url: str, fields: dict[str, Any]
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        for choice in work.choices:
            worker.tokens(work, 0, [5], choice=choice)
            worker.ended(work, finished=work_pb2.FINISH_REASON_LENGTH, choice=choice)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        messages = await collect(stack.stub.StreamGenerate(stack.request(**fields)))
    assert not any(message.resume_token for message in messages)
