"""Streams between two ends, over gRPC and over a Unix socket: the same promises, whatever carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.grpc_stream import GrpcCall, add_links
from diptych.runtime.rpc_streams.method import DECODE, HANDOFF
from diptych.runtime.rpc_streams.stream import ClientStream, LinkService, Refused, Stream, StreamLost
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.runtime.rpc_streams.unix_stream import UnixStream
from diptych.worker.v1 import decode_pb2, work_pb2

Request, Response = decode_pb2.DecodeServiceLinkRequest, decode_pb2.DecodeServiceLinkResponse
Serve = Callable[[Stream], Awaitable[None]]
Connect = Callable[[Serve], Awaitable[ClientStream]]


def said(progress: int) -> Request:
    return Request(heartbeat=work_pb2.Heartbeat(progress=progress))


def answer(progress: int, size: int = 0) -> Response:
    return Response(hello=work_pb2.WorkerHello(worker_id="x" * size, incarnation=progress))


@asynccontextmanager
async def served(serve: Serve, *, door: bool) -> AsyncIterator[str]:
    """The address of a process that serves such streams, with a door for its neighbours or without."""
    services = [LinkService(DECODE, serve)]
    server = make_server(internal=True)
    add_links(server, services)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, False)}"
    await server.start()
    local = UnixServer(services)
    if door:
        await local.open(address)
    yield address
    await local.close()
    await server.stop(None)


@pytest.fixture(params=["grpc", "local"])
async def connect(
    request: pytest.FixtureRequest,
) -> AsyncIterator[Connect]:
    """Opens a stream to whatever should serve it."""
    door = request.param == "local"
    async with AsyncExitStack() as stack:

        async def connected(serve: Serve) -> ClientStream:
            address = await stack.enter_async_context(served(serve, door=door))
            stream = await open_link(address, DECODE)
            stack.push_async_callback(stream.close)
            assert isinstance(stream, UnixStream if door else GrpcCall)
            return stream

        yield connected


async def _echo(stream: Stream) -> None:
    while (message := await stream.read()) is not None:
        await stream.write(answer(message.heartbeat.progress))


async def test_messages_come_once_and_in_order(connect):
    stream = await connect(_echo)
    for number in range(200):
        await stream.write(said(number))
    assert [(await stream.read()).hello.incarnation for _ in range(200)] == list(range(200))


async def test_a_message_of_many_reads_comes_whole(connect):
    async def serve(stream: Stream) -> None:
        await stream.write(answer(1, 5 << 20))

    message = await (await connect(serve)).read()
    assert len(message.hello.worker_id) == 5 << 20


async def test_a_stream_that_was_served_to_its_end_ends_without_an_error(connect):
    async def serve(stream: Stream) -> None:
        await stream.read()
        await stream.write(answer(7))

    stream = await connect(serve)
    await stream.write(said(0))
    assert (await stream.read()).hello.incarnation == 7
    assert await stream.read() is None


async def test_a_refusal_tells_its_reason(connect):
    async def serve(stream: Stream) -> None:
        await stream.read()
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "kv_dtype ≠")

    stream = await connect(serve)
    await stream.write(said(0))
    with pytest.raises(StreamLost) as lost:
        await stream.read()
    assert (lost.value.code, lost.value.details) == (grpc.StatusCode.FAILED_PRECONDITION, "kv_dtype ≠")


async def test_a_server_that_fails_is_lost_and_says_nothing_of_why(connect, caplog):
    async def serve(stream: Stream) -> None:
        raise ZeroDivisionError("a secret")

    stream = await connect(serve)
    with pytest.raises(StreamLost) as lost:
        await stream.read()
    if isinstance(stream, UnixStream):  # gRPC itself tells its peers what a handler raised
        assert "secret" not in lost.value.details


async def test_a_client_that_goes_ends_what_serves_it(connect):
    over = asyncio.Event()

    async def serve(stream: Stream) -> None:
        try:
            await stream.write(answer(1))
            await stream.read()
        finally:
            over.set()

    stream = await connect(serve)
    await stream.read()
    stream.cancel()
    async with asyncio.timeout(20):
        await over.wait()


async def test_cancelling_ends_a_read_that_waits(connect):
    stream = await connect(_echo)
    await stream.write(said(1))
    await stream.read()
    waiting = asyncio.create_task(stream.read())
    await asyncio.sleep(0.05)
    stream.cancel()
    with pytest.raises(StreamLost):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(StreamLost):
        await stream.write(said(2))


async def test_who_writes_waits_for_who_does_not_read(connect):
    written, over = [], asyncio.Event()

    async def serve(stream: Stream) -> None:
        try:
            for number in range(2000):
                await stream.write(answer(number, 100_000))
                written.append(number)
        finally:
            over.set()

    stream = await connect(serve)
    await stream.read()
    before = -1
    while before != len(written):
        before = len(written)
        await asyncio.sleep(0.3)
    assert len(written) < 1000  # 100 MB: gRPC's window grows to a fifth of it
    stream.cancel()
    async with asyncio.timeout(20):
        await over.wait()


async def test_a_server_that_closes_ends_its_streams(connect):
    async with served(_echo, door=True) as address:
        stream = await open_link(address, DECODE)
        await stream.write(said(1))
        await stream.read()
    with pytest.raises(StreamLost):
        await stream.read()
    await stream.close()


async def test_nobody_there_is_a_loss_too():
    stream = await open_link("127.0.0.1:1", HANDOFF)
    with pytest.raises(StreamLost) as lost:
        await stream.read()
    assert lost.value.code is grpc.StatusCode.UNAVAILABLE
    await stream.close()
