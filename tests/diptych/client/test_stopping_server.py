"""What gRPC's server says of calls that have come and not begun when it stops, and what clients do then.

The server is a real one whose event loop stands still while calls arrive, as that of a busy gateway may.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from diptych.client import AsyncClient, CallFailed, Client
from diptych.client.channel import channel_options
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.client.served import served

CALLS = 6
ARRIVED_S = 0.5  # in which calls over loopback have surely come


class Answering(rpc.InferenceServiceServicer):
    """Answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(outputs=[pb.OutputDelta(text=self.name)])


class Silent(rpc.InferenceServiceServicer):
    """Never answers."""

    def __init__(self) -> None:
        self.calls = 0
        self.called, self.over = threading.Event(), threading.Event()

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.calls += 1
        self.called.set()
        self.over.wait(60)
        yield pb.GenerateResponse()


async def start(name: str, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """A server that another one may share its port with, as a gateway's successor does."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    rpc.add_InferenceServiceServicer_to_server(Answering(name), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def replaced(ask: Callable[[str], str]) -> list[str]:
    """What `ask` says of calls that come just before their server stops and another has taken its place.

    ``ask`` runs in several threads; its channel is connected to the old server before the new one is there.
    """
    old, port = await start("old")
    address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(CALLS) as threads:
        assert await asyncio.to_thread(ask, address) == "old"
        new, _ = await start("new", port)
        asked = [threads.submit(ask, address) for _ in range(CALLS)]
        time.sleep(ARRIVED_S)  # noqa: ASYNC251 (the loop is to stand still: no handler begins)
        await old.stop(10)
        answers = [await asyncio.wrap_future(one) for one in asked]
        await new.stop(None)
    return answers


def by_grpc(channels: dict[str, grpc.Channel]) -> Callable[[str], str]:
    """Without any repeating: the answer, or the code."""

    def ask(address: str) -> str:
        if address not in channels:
            channels[address] = grpc.insecure_channel(address, channel_options(0))
        stub = rpc.InferenceServiceStub(channels[address])
        try:
            return "".join(m.outputs[0].text for m in stub.StreamGenerate(pb.GenerateRequest(), timeout=60))
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]

    return ask


def test_grpc_calls_cancelled_what_it_did_not_begin() -> None:
    """The day this fails the client needs to repeat CANCELLED no more."""
    channels: dict[str, grpc.Channel] = {}
    answers = asyncio.run(replaced(by_grpc(channels)))
    for channel in channels.values():
        channel.close()
    assert "CANCELLED" in answers
    assert set(answers) <= {"CANCELLED", "old", "new"}


@pytest.mark.parametrize("resume", [False, True])
def test_clients_ask_the_successor(resume: bool) -> None:
    clients: dict[str, Client] = {}

    def ask(address: str) -> str:
        if address not in clients:
            clients[address] = Client(address, model="m")
        stream = clients[address].stream("x", timeout_s=60, resume=resume)
        return "".join(chunk.text for chunk in stream)

    answers = asyncio.run(replaced(ask))
    for client in clients.values():
        client.close()
    assert set(answers) <= {"old", "new"}
    assert "new" in answers


@pytest.fixture
def silent() -> Iterator[tuple[Silent, str]]:
    service = Silent()
    with served(service, calls=8) as address:
        yield service, address
        service.over.set()


@pytest.mark.parametrize("resume", [False, True])
async def test_what_the_caller_leaves_is_not_repeated(silent: tuple[Silent, str], resume: bool) -> None:
    service, address = silent
    async with AsyncClient(address, model="m") as client:
        async with client.stream("x", resume=resume) as stream:
            reading = asyncio.create_task(anext(stream))
            await asyncio.to_thread(service.called.wait, 60)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        await asyncio.sleep(1.0)  # several times the first wait
    assert service.calls == 1


@pytest.mark.parametrize("resume", [False, True])
def test_closing_the_client_ends_its_streams(silent: tuple[Silent, str], resume: bool) -> None:
    service, address = silent
    client = Client(address, model="m")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(next, client.stream("x", resume=resume))
        assert service.called.wait(60)
        client.close()
        with pytest.raises(CallFailed) as caught:
            reading.result(60)
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert service.calls == 1
