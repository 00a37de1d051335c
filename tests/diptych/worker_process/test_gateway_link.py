"""Ends of a gateway's stream: the worker cancels the attempts that came over it and keeps nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import pytest

from decode_worker.worker import gateway_links
from diptych.runtime.rpc import bind, make_channel, make_server
from diptych.runtime.rpc_streams import unix_stream as local
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.stream import LinkService, Stream, StreamLost
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, work_pb2
from diptych.worker_process.gateway_link import SILENT_TICKS, GatewayLinks
from tests.diptych.worker_process.both_workers import Decode, house
from tests.diptych.worker_process.scripted_gateway import work
from tests.kvtransfer.conftest import until

Request = decode_pb2.DecodeServiceLinkRequest
HELLO = Request(hello=work_pb2.GatewayHello(gateway_id="g"))


@dataclass
class Edge:
    """A decode worker's loop behind its real server."""

    decode: Decode
    links: GatewayLinks
    address: str

    @property
    def streams(self) -> dict:
        return self.links.streams

    async def call(self) -> grpc.aio.StreamStreamCall:
        self.channel = make_channel(self.address)
        call = decode_pb2_grpc.DecodeServiceStub(self.channel).Link()
        await call.write(HELLO)
        return call


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with house("shared_memory", prefills=0) as made:
        links = gateway_links(made.decodes[0].loop, work_pb2.WorkerHello(worker_id="w"), lambda grace_s: None)
        server = make_server(internal=True)
        add_links(server, [LinkService(DECODE, links.serve)])
        port = bind(server, "127.0.0.1", 0, False)
        await server.start()
        yield Edge(made.decodes[0], links, f"127.0.0.1:{port}")
        await server.stop(None)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the collector, which would hide leaks."""
    gc.disable()
    yield
    gc.enable()


async def test_a_broken_stream_cancels_its_attempts(edge, no_garbage_collection):
    call = await edge.call()
    assert (await call.read()).hello.worker_id == "w"
    await call.write(Request(attach=work(("r", 1), (1, 2, 3), 4)))
    await until(lambda: edge.decode.loop.num_waiting == 1)
    call.cancel()
    await until(lambda: edge.decode.loop.num_waiting == 0 and not edge.streams)


async def test_gateways_that_disconnect_at_once_leave_nothing_behind(edge, no_garbage_collection):
    for number in range(30):
        call = await edge.call()
        if number % 2:
            await asyncio.sleep(0.001 * (number % 5))
        call.cancel()
        await edge.channel.close()
    await asyncio.sleep(0.1)
    await until(lambda: not edge.streams, 2)


async def test_a_broken_stream_of_a_gateway_that_does_not_read_ends_at_once(edge, no_garbage_collection):
    call = await edge.call()
    await call.write(Request(attach=work(("r", 1), (1, 2, 3), 4)))
    await until(lambda: edge.decode.loop.num_waiting == 1)
    (stream,) = edge.streams
    for number in range(2000):  # more than the transport's window: the worker hangs in its write
        stream.failed((f"{number:0200}", 1), 0, 1, "x" * 500)
        stream.flush()
        if number % 100 == 0:
            await asyncio.sleep(0.001)
    call.cancel()
    await until(lambda: edge.decode.loop.num_waiting == 0 and not edge.streams)


async def test_a_message_that_cannot_be_handled_ends_the_stream(edge, caplog):
    """Else the gateway would wait for ever: for this request, and for all that it sends afterwards."""
    call = await edge.call()
    await call.read()
    await call.write(Request(attach=work(("good", 1), (1, 2, 3), 4)))
    await call.write(Request(attach=work(("without tokens", 1), (), 4)))
    async with asyncio.timeout(60):
        assert await call.read() is grpc.aio.EOF
    await until(lambda: edge.decode.loop.num_waiting == 0 and not edge.streams)
    assert "could not be handled" in caplog.text
    assert edge.decode.leftovers() == []


async def test_a_silent_gateway_is_dropped_with_its_attempts(edge):
    """A stopped process keeps its connections; one that beats is never silent."""
    silent, beating = await edge.call(), await edge.call()
    await beating.read()
    await silent.write(Request(attach=work(("r", 1), (1, 2, 3), 4)))
    await until(lambda: edge.decode.loop.num_waiting == 1)
    for number in range(SILENT_TICKS + 1):
        await beating.write(Request(heartbeat=work_pb2.Heartbeat(progress=number)))
        await until(lambda: any(not stream.silent_ticks for stream in edge.streams.values()))
        edge.links.tick()
    await until(lambda: edge.decode.loop.num_waiting == 0)
    assert len(edge.streams) == 1
    edge.links.heartbeat(work_pb2.Heartbeat(progress=1))
    assert (await beating.read()).heartbeat.progress == 1


async def test_a_silent_gateway_that_does_not_read_is_dropped(edge):
    """A stopped process: its buffers fill up, and a write waits for room in them as long as it stands."""
    ended = asyncio.Event()

    async def serve(link: Stream) -> None:
        try:
            await edge.links.serve(link)
        finally:
            ended.set()

    door = UnixServer([LinkService(DECODE, serve)])
    await door.open(edge.address)
    call = await local.connect(edge.address, DECODE)
    await call.write(HELLO)
    await until(lambda: edge.streams)
    (stream,) = edge.streams
    for number in range(4000):  # more than both ends' buffers
        stream.failed((f"{number:0200}", 1), 0, 1, "x" * 500)
        stream.flush()
        await asyncio.sleep(0)
    for _ in range(SILENT_TICKS + 1):
        edge.links.tick()
    async with asyncio.timeout(5):
        await ended.wait()
    with pytest.raises(StreamLost):
        await _read_all(call)
    await call.close()
    await door.close()


async def _read_all(link: Stream) -> None:
    while await link.read() is not None:
        pass


async def test_a_stream_without_hello_is_refused(edge):
    call = decode_pb2_grpc.DecodeServiceStub(make_channel(edge.address)).Link()
    await call.write(Request(cancel=work_pb2.Cancel()))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not edge.streams
