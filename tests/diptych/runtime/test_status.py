"""The error table as clients see it, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from diptych.runtime import errors
from diptych.runtime.rpc import bind, make_channel, make_server
from diptych.runtime.status import MAX_DETAILS_BYTES, MAX_MESSAGE_BYTES, abort, to_status
from tests.diptych.runtime.eventually import eventually

C = grpc.StatusCode

TABLE: list[tuple[errors.DiptychError, grpc.StatusCode, str, dict[str, str]]] = [
    (
        errors.InvalidParameter("sampling.top_p", "must be in (0, 1]"),
        C.INVALID_ARGUMENT,
        "INVALID_PARAMETER",
        {},
    ),
    (errors.UnsupportedFeature("lora"), C.INVALID_ARGUMENT, "UNSUPPORTED_FEATURE", {}),
    (
        errors.ContextLengthExceeded(10, 20, 25),
        C.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        {"prompt_tokens": "10", "max_tokens": "20", "limit": "25"},
    ),
    (errors.UnknownModel("m"), C.NOT_FOUND, "UNKNOWN_MODEL", {}),
    (errors.DuplicateRequest("r"), C.ALREADY_EXISTS, "DUPLICATE_REQUEST", {}),
    (errors.QueueFull(1.5), C.RESOURCE_EXHAUSTED, "QUEUE_FULL", {}),
    (errors.KvCapacity(), C.RESOURCE_EXHAUSTED, "KV_CAPACITY", {}),
    (errors.ImageMemory(), C.RESOURCE_EXHAUSTED, "IMAGE_MEMORY", {}),
    (errors.DeadlineUnattainable(0.0001), C.RESOURCE_EXHAUSTED, "DEADLINE_UNATTAINABLE", {}),
    (errors.GrammarNotChecked(), C.UNAVAILABLE, "GRAMMAR_NOT_CHECKED", {}),
    (errors.NoReadyWorker("prefill"), C.UNAVAILABLE, "NO_READY_WORKER", {"role": "prefill"}),
    (errors.Draining(), C.UNAVAILABLE, "DRAINING", {}),
    (errors.WorkerLost(), C.UNAVAILABLE, "WORKER_LOST", {"tokens_emitted": "0"}),
    (errors.WorkerLost(3), C.ABORTED, "WORKER_LOST", {"tokens_emitted": "3"}),
    (errors.ShutDown(3), C.ABORTED, "SHUTTING_DOWN", {"tokens_emitted": "3"}),
    (errors.KvTransferFailed(), C.UNAVAILABLE, "KV_TRANSFER_FAILED", {"tokens_emitted": "0"}),
    (errors.KvTransferFailed(1), C.ABORTED, "KV_TRANSFER_FAILED", {"tokens_emitted": "1"}),
    (errors.DeadlineExceeded("queue"), C.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", {"phase": "queue"}),
    (errors.Cancelled(), C.CANCELLED, "CANCELLED", {}),
    (errors.NoValidToken(), C.FAILED_PRECONDITION, "NO_VALID_TOKEN", {}),
    (errors.Internal(), C.INTERNAL, "INTERNAL", {}),
]


class Caller:
    """A server whose one method fails with what it is told, and a client of it."""

    def __init__(self) -> None:
        self.error: BaseException = errors.Internal()
        self.request_id = "r-1"
        self.seen: list[BaseException] = []
        self.call: Callable[..., Any]

    async def handle(self, request: bytes, context: Any) -> bytes:
        try:
            if isinstance(self.error, asyncio.CancelledError):
                await asyncio.sleep(30)
            raise self.error
        except BaseException as error:
            self.seen.append(error)
            await abort(context, error, self.request_id)

    async def fail(self, error: BaseException) -> grpc.aio.AioRpcError:
        self.error = error
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await self.call(b"", timeout=60)
        return info.value


@pytest_asyncio.fixture
async def caller() -> AsyncIterator[Caller]:
    caller = Caller()
    server = make_server(internal=False)
    handler = grpc.unary_unary_rpc_method_handler(caller.handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": handler}),))
    port = bind(server, "127.0.0.1", 0, insecure=False)
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        caller.call = channel.unary_unary("/t.T/M")
        yield caller
    await server.stop(0)


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    found = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found


@pytest.mark.parametrize(
    ("error", "code", "reason", "metadata"), TABLE, ids=lambda value: type(value).__name__
)
async def test_every_error_has_its_code_and_reason(
    caller: Caller, error: errors.DiptychError, code: grpc.StatusCode, reason: str, metadata: dict[str, str]
) -> None:
    answer = await caller.fail(error)
    assert answer.code() is code
    found = details(answer)
    assert found["ErrorInfo"].reason == reason
    assert found["ErrorInfo"].domain == "diptych"
    assert dict(found["ErrorInfo"].metadata) == metadata
    assert found["RequestInfo"].request_id == "r-1"
    trailers = dict(answer.trailing_metadata() or ())
    assert trailers["x-request-id"] == "r-1"
    assert (
        ("RetryInfo" in found) == ("grpc-retry-pushback-ms" in trailers) == (error.retry_after_s is not None)
    )
    assert ("BadRequest" in found) == bool(error.violations)


async def test_the_retry_hint_is_given_both_ways(caller: Caller) -> None:
    answer = await caller.fail(errors.QueueFull(1.2345))
    assert dict(answer.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1235"
    assert details(answer)["RetryInfo"].retry_delay.ToMilliseconds() == 1235


async def test_violations_name_the_field_and_the_reason(caller: Caller) -> None:
    answer = await caller.fail(errors.UnsupportedFeature("sampling.n", "must be 1"))
    [violation] = details(answer)["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.n", "must be 1")
    assert violation.reason == "UNSUPPORTED_FEATURE"


async def test_a_bug_does_not_tell_its_text(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    answer = await caller.fail(KeyError("the secret prompt"))
    assert answer.code() is C.INTERNAL
    assert "secret" not in repr(answer) + repr(answer.trailing_metadata())
    assert "r-1" in caplog.text
    assert "KeyError" in caplog.text


async def test_names_from_clients_cannot_break_the_answer(caller: Caller) -> None:
    caller.request_id = "späß\n" + "x" * 10_000
    answer = await caller.fail(errors.UnknownModel("../\0\n" + "é" * 10_000))
    assert answer.code() is C.NOT_FOUND
    assert details(answer)["ResourceInfo"].resource_name.startswith("../??")


async def test_a_cancellation_is_raised_on(caller: Caller) -> None:
    caller.error = asyncio.CancelledError()
    call = caller.call(b"")
    await asyncio.sleep(0.2)
    call.cancel()
    await eventually(lambda: bool(caller.seen))
    assert isinstance(caller.seen[0], asyncio.CancelledError)


def test_sizes_are_bounded_whatever_is_put_in() -> None:
    huge = errors.InvalidParameter("f" * 100_000, "ü" * 100_000)
    huge.violations *= 10_000
    huge.metadata["key"] = "v" * 100
    status = to_status(huge, "r")
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert status.status.ByteSize() <= MAX_DETAILS_BYTES
    names = [detail.TypeName() for detail in status.status.details]
    assert names == ["google.rpc.ErrorInfo", "google.rpc.RequestInfo", "google.rpc.BadRequest"]
