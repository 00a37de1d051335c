"""Rows of the contract's table of errors about workers and load, in both APIs of a real gateway.

The rows about bad requests are in tests/end_to_end/public_api/test_bad_input.py, those about credentials,
permissions and quotas in tests/gateway/access/test_credentials.py.
That a loss which can be made up for is no error at all is in test_lost_workers.py. KV_CAPACITY is not
raised either: requests wait for blocks, and one that can never have enough is CONTEXT_LENGTH_EXCEEDED.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import pytest

from diptych.runtime import errors
from diptych.worker.v1 import work_pb2
from gateway.admission.wait import FIRST_RETRY_S
from gateway.model.served_model import ServedModel
from tests.gateway.failing_calls import SECRET, Told, check_http, told
from tests.gateway.running_gateway import Stack, collect, running, until
from tests.gateway.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, ScriptedWorker

Code = grpc.StatusCode
PROMPT = f"Say {SECRET} to nobody"


def failing(reason: work_pb2.FailureReason, *, after: int = 0) -> Script:
    """Return the script of a worker that fails after `after` tokens."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if after:
            worker.tokens(work, 0, list(range(1, after + 1)))
        worker.fail(work, reason)

    return script


@asynccontextmanager
async def hung(stack: Stack) -> AsyncIterator[None]:
    """Occupy the only place with one request."""
    call = stack.stub.StreamGenerate(stack.request("Hello", request_id="first"))
    await until(lambda: stack.core.gate.queue.running == 1)
    yield
    call.cancel()


def measured(stack: Stack, tokens_per_s: float) -> None:
    """Set the measured prefill rate."""
    rate = stack.core.gate.queue.rate
    rate._units, rate._seconds = 1000 * tokens_per_s, 1000.0


@asynccontextmanager
async def slow(stack: Stack) -> AsyncIterator[None]:
    """Occupy the only place with one request, at a measured rate of one token per second."""
    async with hung(stack):
        measured(stack, 1.0)
        yield


@asynccontextmanager
async def crowded(stack: Stack) -> AsyncIterator[None]:
    """Fill the queue: one request runs and another waits."""
    async with hung(stack):
        waiting = stack.stub.StreamGenerate(stack.request("a b c " * 8))
        await until(lambda: stack.core.gate.queue.waiting == 1)
        yield
        waiting.cancel()


@asynccontextmanager
async def draining(stack: Stack) -> AsyncIterator[None]:
    """Drain the gateway while a request runs."""
    async with hung(stack):
        drain = asyncio.ensure_future(stack.gateway.drain())
        await stack.until_ready(False)
        yield
    await drain


@asynccontextmanager
async def nothing(stack: Stack) -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class Row:
    """Error condition and the status that both APIs must report."""

    code: grpc.StatusCode
    reason: str
    http: int
    retry: bool = False
    metadata: dict[str, str | None] = field(default_factory=dict)  # None: whatever it is
    script: Script | None = None
    workers: Callable[[Script | None], list[ScriptedWorker]] = lambda script: [
        ScriptedPrefill(),
        ScriptedDecode(script),
    ]
    settings: dict[str, Any] = field(default_factory=dict)
    situation: Callable[[Stack], Any] = nothing
    timeout_s: float = 20.0


ONE = {"max_inflight": 1}
ROWS = {
    "the queue is full": Row(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        429,
        retry=True,
        settings={**ONE, "max_queued_tokens": 60},
        situation=crowded,
    ),
    "the wait is longer than the deadline": Row(
        Code.RESOURCE_EXHAUSTED,
        "DEADLINE_UNATTAINABLE",
        429,
        retry=True,
        settings=ONE,
        situation=slow,
        timeout_s=3.0,
    ),
    "no prefill worker": Row(
        Code.UNAVAILABLE,
        "NO_READY_WORKER",
        503,
        retry=True,
        metadata={"role": "prefill"},
        settings={"worker_wait_timeout": 0},
        workers=lambda script: [ScriptedDecode()],
    ),
    "the server drains": Row(
        Code.UNAVAILABLE,
        "DRAINING",
        503,
        retry=True,
        settings={"shutdown_timeout": 10.0},
        situation=draining,
    ),
    "a worker is lost before the first token": Row(
        Code.UNAVAILABLE,
        "WORKER_LOST",
        503,
        metadata={"tokens_emitted": "0"},
        script=failing(work_pb2.FAILURE_REASON_PEER_LOST),
    ),
    "the handoff fails twice": Row(
        Code.UNAVAILABLE,
        "KV_TRANSFER_FAILED",
        503,
        metadata={"tokens_emitted": "0"},
        script=failing(work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED),
    ),
    "it can never fit": Row(
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        400,
        script=failing(work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY),
    ),
    "a worker saw the deadline pass": Row(
        Code.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        504,
        metadata={"phase": None},
        script=failing(work_pb2.FAILURE_REASON_DEADLINE),
    ),
    "the rules leave no token": Row(
        Code.FAILED_PRECONDITION,
        "NO_VALID_TOKEN",
        400,
        script=failing(work_pb2.FAILURE_REASON_NO_VALID_TOKEN),
    ),
    "a bug": Row(
        Code.INTERNAL,
        "INTERNAL",
        500,
        script=failing(work_pb2.FAILURE_REASON_INTERNAL),
    ),
}


async def over_grpc(stack: Stack, row: Row) -> Told:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.StreamGenerate(stack.request(PROMPT), timeout=row.timeout_s))
    return told(caught.value)


async def over_http(stack: Stack, row: Row) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": stack.model.card.name, "prompt": PROMPT, "stream": True}
    headers = {"x-request-timeout-ms": str(int(row.timeout_s * 1000))}
    url = f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        text, sent = await answer.text(), dict(answer.headers)
    return answer.status, check_http(answer.status, text, answer.headers), sent


@pytest.mark.parametrize("name", ROWS)
async def test_error_condition_has_its_documented_status_and_details(
    bundled: ServedModel, redis_url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = ROWS[name]
    workers = row.workers(row.script)
    async with running(bundled, redis_url, *workers, **row.settings) as stack, row.situation(stack):
        found = await over_grpc(stack, row)
        status, error, headers = await over_http(stack, row)
    assert (found.code, found.reason) == (row.code, row.reason)
    assert row.metadata.keys() <= found.metadata.keys()
    assert all(found.metadata[key] == value for key, value in row.metadata.items() if value is not None)
    assert (found.retry_s is not None) is row.retry
    assert (status, error["code"]) == (row.http, row.reason.lower())
    assert ("Retry-After" in headers) is row.retry
    assert SECRET not in caplog.text


Tell = Callable[[Stack], Awaitable[str]]


async def _last_of_grpc(stack: Stack) -> str:
    received: list[int] = []

    async def receive() -> None:
        async for message in stack.stub.StreamGenerate(stack.request(PROMPT)):
            received.extend(token for output in message.outputs for token in output.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive()
    assert received == [1, 2, 3]
    found = told(caught.value)
    assert (found.code, found.metadata) == (Code.ABORTED, {"tokens_emitted": "3"})
    return found.reason


async def _last_of_http(stack: Stack) -> str:
    body = {"model": stack.model.card.name, "prompt": PROMPT, "stream": True}
    url = f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
        events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n") if line]
    assert "[DONE]" not in events
    reason: str = check_http(500, events[-1], {})["code"]
    return reason.upper()


@pytest.mark.parametrize("tell", [_last_of_grpc, _last_of_http])
@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (work_pb2.FAILURE_REASON_PEER_LOST, "WORKER_LOST"),
        (work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED, "KV_TRANSFER_FAILED"),
    ],
)
async def test_failure_after_output_is_aborted(
    bundled: ServedModel, redis_url: str, tell: Tell, reason: work_pb2.FailureReason, expected: str
) -> None:
    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        if work.id.attempt == 1:
            worker.tokens(work, 0, [1, 2, 3])
            await asyncio.sleep(0.05)
        worker.fail(work, reason)

    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(script)) as stack:
        assert await tell(stack) == expected


async def test_deadline_ends_the_call_in_both_apis(bundled: ServedModel, redis_url: str) -> None:
    """gRPC's own client tells its caller; over HTTP the server does, with the phase."""
    row = Row(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, timeout_s=0.3)
    async with running(bundled, redis_url, ScriptedPrefill(idle=True), ScriptedDecode()) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack.stub.StreamGenerate(stack.request(PROMPT), timeout=0.3))
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        status, error, _ = await over_http(stack, row)
        assert (status, error["code"]) == (504, "deadline_exceeded")
        await stack.until_idle()


async def test_live_request_id_is_refused_in_both_apis(bundled: ServedModel, redis_url: str) -> None:
    async with running(bundled, redis_url, ScriptedPrefill(idle=True), ScriptedDecode()) as stack:
        async with hung(stack):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.stub.Generate(stack.request(PROMPT, request_id="first"))
            found = told(caught.value)
            body = {"model": stack.model.card.name, "prompt": PROMPT, "request_id": "first"}
            url = f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                error = check_http(answer.status, await answer.text(), answer.headers)
        assert (found.code, found.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        assert found.resource == ("request", "first")
        assert found.request_id == "first"
        assert (answer.status, error["code"]) == (409, "duplicate_request")
        assert answer.headers["x-should-retry"] == "false"


async def test_retry_hint_is_the_wait_of_the_queue(bundled: ServedModel, redis_url: str) -> None:
    """Check a fixed time before any rate was measured, then the time of the waiting tokens."""
    row = ROWS["the queue is full"]
    workers = ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, *workers, **row.settings) as stack, crowded(stack):
        assert (await over_grpc(stack, row)).retry_s == FIRST_RETRY_S
        queue = stack.core.gate.queue
        measured(stack, queue.waiting_tokens / 4.0)
        assert (await over_grpc(stack, row)).retry_s == pytest.approx(4.0, abs=0.01)


def test_every_documented_error_has_a_condition() -> None:
    """Fail for a new error class without a row here or among the bad requests."""

    def leaves(cls: type) -> Iterator[type]:
        subs = cls.__subclasses__()
        yield from [cls] if not subs else (leaf for sub in subs for leaf in leaves(sub))

    tested = {row.reason for row in ROWS.values()} | {"DUPLICATE_REQUEST"}
    elsewhere = {"SLOW_READER", "INVALID_PARAMETER", "UNSUPPORTED_FEATURE", "UNKNOWN_MODEL", "UNKNOWN_WORKER"}
    elsewhere |= {"UNKNOWN_OBJECT", "STORAGE_FULL"}  # of files and batches: test_batches.py
    elsewhere |= {"SHUTTING_DOWN"}  # comes after output only: test_generate.py
    elsewhere |= {"UNAUTHENTICATED", "PERMISSION_DENIED", "QUOTA_EXCEEDED", "GRAMMAR_NOT_CHECKED"}
    elsewhere |= {"ROLE_CHANGE_REFUSED"}  # test_role_changes.py
    elsewhere |= {"IMAGE_MEMORY"}  # images/test_intake.py
    # test_adapters.py has those of adapters.
    elsewhere |= {"UNKNOWN_ADAPTER", "ADAPTER_EXISTS", "ADAPTER_REFUSED", "ADAPTER_NOT_LOADED"}
    never_or_the_client = {"KV_CAPACITY", "CANCELLED"}
    ours = {leaf for leaf in leaves(errors.DiptychError) if leaf.__module__.startswith(f"{errors.__name__}.")}
    assert {leaf.reason for leaf in ours} == tested | elsewhere | never_or_the_client  # type: ignore[attr-defined]
