"""A stream that goes on by itself, against real servers that break off, refuse, or are not there."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import grpc
import pytest

from diptych.client import AsyncClient, CallFailed, Client, Completion
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.client.served import served

IDS = list(range(20, 30))
Code = grpc.StatusCode
HINT_S = 0.2
NOBODY = "127.0.0.1:1"


class Server(rpc.InferenceServiceServicer):
    """Says IDS, and breaks off with `code` after `delivers` of them in each call, while there are any.

    Its first `refusals` calls are refused with a hint when to come back, also those that ask for its model.
    One that `dies` says nothing more once it has broken off.
    """

    def __init__(
        self,
        code: Code = Code.ABORTED,
        delivers: int | None = None,
        *,
        refusals: int = 0,
        dies: bool = False,
    ) -> None:
        self.code, self.delivers, self.refusals, self.dies = code, delivers, refusals, dies
        self.requests: list[pb.GenerateRequest] = []
        self.asked_at: list[float] = []
        self.asked = threading.Event()
        self.listed = 0

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self.listed += 1
        if self.listed <= self.refusals:
            self._refuse(context)
        return pb.ListModelsResponse(models=[pb.Model(name="served")])

    def _refuse(self, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", str(round(HINT_S * 1000))),))
        context.abort(Code.RESOURCE_EXHAUSTED, "the queue is full")

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.asked_at.append(time.monotonic())
        self.asked.set()
        if self.dies and len(self.requests) > 1:
            context.abort(Code.UNAVAILABLE, "it is dead")
        if len(self.requests) <= self.refusals:
            self._refuse(context)
        have = len(request.received_token_ids)
        assert list(request.received_token_ids) == IDS[:have]
        assert bool(request.resume_token) == bool(have)
        for number, token in enumerate(IDS[have:]):
            if number == self.delivers:
                context.abort(self.code, "it broke")
            first = number == 0
            message = pb.GenerateResponse(
                request_id="r" if first else "", resume_token=f"t{len(self.requests)}" if first else ""
            )
            message.outputs.add(text=f"<{token}>", token_ids=[token])
            if token == IDS[-1]:
                message.outputs[0].finish_reason = pb.FINISH_REASON_LENGTH
                message.usage.completion_tokens = len(IDS)
            yield message
        if self.delivers == len(IDS) - have:
            context.abort(self.code, "it broke after the end")


@pytest.fixture
def serving() -> Iterator[Callable[[Server], str]]:
    with ExitStack() as servers:
        yield lambda service: servers.enter_context(served(service))


def by_the_sync_client(
    addresses: list[str],
    *,
    model: str | None = "m",
    retries: int = 3,
    timeout_s: float = 20,
    **options: object,
) -> Completion:
    with Client(addresses, model=model, retries=retries) as client:
        stream = client.stream("x", timeout_s=timeout_s, resume=True, **options)  # type: ignore[arg-type]
        for _ in stream:
            pass
        return stream.received.completion()


def by_the_async_client(
    addresses: list[str],
    *,
    model: str | None = "m",
    retries: int = 3,
    timeout_s: float = 20,
    **options: object,
) -> Completion:
    async def run() -> Completion:
        async with AsyncClient(addresses, model=model, retries=retries) as client:
            stream = client.stream("x", timeout_s=timeout_s, resume=True, **options)  # type: ignore[arg-type]
            async for _ in stream:
                pass
            return stream.received.completion()

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
@pytest.mark.parametrize("code", [Code.ABORTED, Code.UNAVAILABLE, Code.CANCELLED])
def test_stream_resumes_at_the_next_server(
    serving: Callable[[Server], str], ask: Callable[..., Completion], code: Code
) -> None:
    broken, whole = Server(code, delivers=3), Server()
    answer = ask([serving(broken), serving(whole)], request_id="mine")
    assert list(answer.token_ids) == IDS
    assert answer.text == "".join(f"<{one}>" for one in IDS)
    assert answer.finish_reason == "length"
    assert [r.request_id for r in broken.requests + whole.requests] == ["mine", "mine.2"]
    assert whole.requests[0].resume_token == "t1"


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_a_break_after_the_last_message_loses_nothing(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    """A gateway that dies between the end of a stream and its status: there is nothing to ask for again."""
    dying, other = Server(Code.UNAVAILABLE, delivers=len(IDS)), Server()
    answer = ask([serving(dying), serving(other)])
    assert list(answer.token_ids) == IDS
    assert answer.finish_reason == "length"
    assert (len(dying.requests), other.requests) == (1, [])


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_stream_resumes_as_often_as_that_helps(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    """Each call brings one token, and the newest token is used; what never began is asked as it was."""
    dead, slow = Server(Code.UNAVAILABLE, delivers=0), Server(delivers=1)
    answer = ask([serving(dead), serving(slow)])
    assert list(answer.token_ids) == IDS
    assert [r.resume_token for r in slow.requests] == ["", *(f"t{n}" for n in range(1, len(IDS)))]


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_a_server_that_refuses_is_asked_again_when_it_said(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    full = Server(refusals=2)
    assert list(ask([serving(full)]).token_ids) == IDS
    first, second, third = full.asked_at
    assert min(second - first, third - second) >= HINT_S * 0.9


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_the_survivor_may_be_full_when_the_streams_of_a_dead_server_come(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    dying, full = Server(Code.UNAVAILABLE, delivers=3, dies=True), Server(refusals=3)
    assert list(ask([serving(dying), serving(full)]).token_ids) == IDS
    assert [r.resume_token for r in full.requests] == ["t1"] * 4
    assert min(b - a for a, b in pairwise(full.asked_at)) >= HINT_S * 0.9


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_the_model_is_asked_of_a_server_that_answers(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    full = Server(refusals=1)
    assert list(ask([NOBODY, serving(full)], model=None).token_ids) == IDS
    assert full.listed == 2  # and no more, once it is known
    assert {r.model for r in full.requests} == {"served"}


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_the_deadline_holds_while_the_model_is_asked(ask: Callable[..., Completion]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(CallFailed) as caught:
            ask([address], model=None, timeout_s=0.3)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
@pytest.mark.parametrize("retries", [0, 2])
def test_refusals_count_as_retries(
    serving: Callable[[Server], str], ask: Callable[..., Completion], retries: int
) -> None:
    full = Server(refusals=9)
    with pytest.raises(CallFailed) as caught:
        ask([serving(full)], retries=retries)
    assert (caught.value.code, caught.value.retry_after_s) == (Code.RESOURCE_EXHAUSTED, HINT_S)
    assert len(full.requests) == 1 + retries


def test_closing_the_client_ends_a_stream_that_waits(serving: Callable[[Server], str]) -> None:
    full = Server(refusals=1)
    client = Client(serving(full), model="m")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(next, client.stream("x", resume=True))
        assert full.asked.wait(20)
        time.sleep(HINT_S / 2)
        client.close()
        with pytest.raises(CallFailed):
            reading.result(20)
    assert len(full.requests) == 1


async def test_closing_the_asynchronous_client_ends_a_stream_that_waits(
    serving: Callable[[Server], str],
) -> None:
    full = Server(refusals=1)
    client = AsyncClient(serving(full), model="m")
    reading = asyncio.ensure_future(anext(client.stream("x", resume=True)))
    assert await asyncio.to_thread(full.asked.wait, 20)
    await asyncio.sleep(HINT_S / 2)
    await client.close()
    with pytest.raises(CallFailed):
        await reading
    assert len(full.requests) == 1


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.INTERNAL, Code.RESOURCE_EXHAUSTED])
def test_other_failures_are_told_at_once(
    serving: Callable[[Server], str], ask: Callable[..., Completion], code: Code
) -> None:
    """RESOURCE_EXHAUSTED among them where no server says when to come back: a message was too large."""
    server = Server(code, delivers=2)
    with pytest.raises(CallFailed) as caught:
        ask([serving(server)])
    assert (caught.value.code, len(server.requests)) == (code, 1)


@pytest.mark.parametrize("ask", [by_the_sync_client, by_the_async_client])
def test_stream_without_a_server_to_resume_at_is_aborted(
    serving: Callable[[Server], str], ask: Callable[..., Completion]
) -> None:
    """The plan sees UNAVAILABLE and tries elsewhere; its caller has output and sees ABORTED."""
    dying, full = Server(Code.UNAVAILABLE, delivers=3, dies=True), Server(Code.UNAVAILABLE, delivers=0)
    with pytest.raises(CallFailed, match="it broke") as caught:
        ask([serving(dying), serving(full)], timeout_s=1)
    assert caught.value.code is Code.ABORTED
    assert full.requests
