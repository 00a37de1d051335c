"""The door for neighbours against those who should not come in, and frames that should not come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest
import uvloop

from diptych.runtime.rpc import MAX_MESSAGE_BYTES
from diptych.runtime.rpc_streams import unix_server as local_door
from diptych.runtime.rpc_streams import unix_stream as local
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.grpc_stream import GrpcCall
from diptych.runtime.rpc_streams.method import DECODE, HANDOFF
from diptych.runtime.rpc_streams.stream import LinkService, Stream, StreamLost
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.runtime.rpc_streams.unix_stream import FrameKind, UnixStream, socket_name
from diptych.worker.v1 import decode_pb2, work_pb2
from tests.diptych.runtime.eventually import eventually

Heartbeat = decode_pb2.DecodeServiceLinkRequest(heartbeat=work_pb2.Heartbeat(progress=5))


class Served:
    """What a door let in."""

    def __init__(self) -> None:
        self.streams = 0
        self.messages: list[int] = []
        self.lost: list[StreamLost] = []

    async def serve(self, stream: Stream) -> None:
        self.streams += 1
        try:
            while (message := await stream.read()) is not None:
                self.messages.append(message.heartbeat.progress)
        except StreamLost as lost:
            self.lost.append(lost)
            raise


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
async def served(address) -> AsyncIterator[Served]:
    found = Served()
    door = UnixServer([LinkService(DECODE, found.serve)])
    await door.open(address)
    yield found
    await door.close()


async def _raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(socket_name(address))


def _frame(kind: int, body: bytes, length: int | None = None) -> bytes:
    return (len(body) if length is None else length).to_bytes(4, "little") + bytes([kind]) + body


async def test_another_user_s_door_is_not_taken(address, served, monkeypatch):
    monkeypatch.setattr(local.os, "geteuid", lambda: os.getuid() + 1)
    stream = await open_link(address, DECODE)
    assert isinstance(stream, GrpcCall)
    await stream.close()
    assert served.streams == 0


async def test_another_user_is_not_let_in(address, served, monkeypatch):
    monkeypatch.setattr(local_door, "same_user", lambda connection: False)
    reader, writer = await _raw(address)
    writer.write(_frame(FrameKind.OPEN, DECODE.path.encode()))
    with contextlib.suppress(ConnectionResetError):  # the kernel's word where something was not read
        assert await reader.read() == b""
    writer.close()
    assert served.streams == 0


async def test_a_service_that_is_not_here_is_refused(address, served):
    stream = await open_link(address, HANDOFF)
    with pytest.raises(StreamLost):
        await stream.read()
    await stream.close()
    assert served.streams == 0


async def test_who_does_not_say_what_he_wants_is_shown_out(address, served, monkeypatch):
    monkeypatch.setattr(local_door, "_OPEN_WITHIN_S", 0.1)
    reader, writer = await _raw(address)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    assert served.streams == 0


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (_frame(FrameKind.MESSAGE, b"", MAX_MESSAGE_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (_frame(FrameKind.MESSAGE, b"\xff\xff\xff"), grpc.StatusCode.INTERNAL),
        (_frame(77, b"?"), grpc.StatusCode.INTERNAL),
        (_frame(FrameKind.END, b""), grpc.StatusCode.UNKNOWN),
        (_frame(FrameKind.MESSAGE, b"half", 10), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_frame_that_should_not_come_ends_the_stream_and_no_other(address, served, bad, code):
    good = await open_link(address, DECODE)
    _, writer = await _raw(address)
    writer.write(
        _frame(FrameKind.OPEN, DECODE.path.encode())
        + _frame(FrameKind.MESSAGE, Heartbeat.SerializeToString())
    )
    writer.write(bad)
    writer.write_eof()
    await eventually(lambda: bool(served.lost))
    assert served.lost[0].code is code
    await good.write(Heartbeat)
    await eventually(lambda: served.messages == [5, 5])
    await good.close()
    writer.close()


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_stream_that_is_closed_is_lost_to_who_writes(address, new_loop):
    """Whatever the transport of the event loop says of it: uvloop's raises RuntimeError."""

    async def write() -> None:
        async def leave(stream: UnixStream) -> None:
            stream.cancel()

        async with AsyncExitStack() as stack:
            door = UnixServer([LinkService(DECODE, leave)])
            stack.push_async_callback(door.close)
            await door.open(address)
            left, closed = await open_link(address, DECODE), await open_link(address, DECODE)
            stack.push_async_callback(left.close)
            await closed.close()
            for stream in (closed, left, closed, left):
                await asyncio.sleep(0.05)
                with pytest.raises(StreamLost):
                    await stream.write(Heartbeat)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(write())


async def test_a_message_that_would_not_be_read_is_not_written(address, served, caplog):
    stream = await open_link(address, DECODE)
    token_ids = [2**31] * (MAX_MESSAGE_BYTES // 5 + 1)
    with pytest.raises(StreamLost) as lost:
        await stream.write(decode_pb2.DecodeServiceLinkRequest(attach=work_pb2.Work(token_ids=token_ids)))
    assert lost.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in caplog.text
    await stream.write(Heartbeat)
    await eventually(lambda: served.messages == [5])
    await stream.close()


async def test_a_name_that_is_taken_leaves_links_to_grpc(address, served, caplog):
    second = Served()
    door = UnixServer([LinkService(DECODE, second.serve)])
    await door.open(address)
    assert "only over gRPC" in caplog.text
    await door.close()
    stream = await open_link(address, DECODE)  # whoever had the name has it still
    await stream.write(Heartbeat)
    await eventually(lambda: served.messages == [5])
    await stream.close()


async def test_a_door_that_closed_is_not_found(address):
    door = UnixServer([])
    await door.open(address)
    await door.close()
    stream = await open_link(address, DECODE)
    assert isinstance(stream, GrpcCall)
    await stream.close()
