"""Links within one network namespace: frames over a Unix socket, which no C core and no thread is between.

A hop costs 30 µs of CPU instead of 200 (grpc.aio, both ends, one small message; three times as much on either
side where caches are cold), and decode workers send one message a step.

    opening end → the path of the method
    both        → messages, until one end says that it has said all, or why it refuses

The abstract name of the socket is the address under which the worker is known, so who can reach it finds it
without being told; abstract names are per network namespace, as ports are. Each end checks that the other one
runs as the same user. Anything else, and the link goes over gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import socket
import struct
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message

from diptych.runtime.peer_credentials import peer_credentials
from diptych.runtime.rpc import MAX_MESSAGE_BYTES
from diptych.runtime.rpc_streams.method import LinkMethod
from diptych.runtime.rpc_streams.stream import StreamLost

READ_AHEAD_BYTES = 1 << 20
"""Bytes that may have come and not been read; beyond it the other end's writes wait."""

_HEADER = struct.Struct("<IB")  # length of what follows, kind
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_log = logging.getLogger(__name__)


class FrameKind(enum.IntEnum):
    """Kind of a frame."""

    OPEN = 0  # the path of the method, UTF-8
    MESSAGE = 1  # a protobuf message
    END = 2  # gRPC's status code in one byte, details in UTF-8; nothing follows


class Frame(NamedTuple):
    kind: int
    body: bytes


def socket_name(address: str) -> str:
    """Return the abstract socket of the worker at host:port."""
    return f"\0diptych-links-{address}"


class UnixStream:
    """End of a stream; `incoming` are the other end's messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: type[Message]
    ) -> None:
        self._reader, self._writer = reader, writer
        self._incoming = incoming

    async def read(self) -> Any:
        frame = await read_frame(self._reader)
        if frame.kind == FrameKind.END:
            code = _CODES.get(frame.body[0] if frame.body else -1, grpc.StatusCode.UNKNOWN)
            if code is grpc.StatusCode.OK:
                return None
            raise StreamLost(code, frame.body[1:].decode(errors="replace"))
        if frame.kind != FrameKind.MESSAGE:
            raise StreamLost(grpc.StatusCode.INTERNAL, f"a frame of kind {frame.kind}")
        try:
            return self._incoming.FromString(frame.body)
        except DecodeError as error:
            raise StreamLost(grpc.StatusCode.INTERNAL, f"a frame that is no message: {error}") from error

    async def write(self, message: Message) -> None:
        await self._write(FrameKind.MESSAGE, message.SerializeToString())

    async def open(self, method: LinkMethod) -> None:
        """Send the first frame of the end that connected."""
        await self._write(FrameKind.OPEN, method.path.encode())

    def end(self, code: grpc.StatusCode, details: str = "") -> None:
        """Say why no more comes, and close once that is sent."""
        if not self._writer.is_closing():
            self._writer.write(_framed(FrameKind.END, bytes([code.value[0]]) + details.encode()))
        self._writer.close()

    def cancel(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self.cancel()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _write(self, kind: FrameKind, body: bytes) -> None:
        if self._writer.is_closing():  # where an event loop's transport may raise anything
            raise StreamLost(_UNAVAILABLE, "the connection broke")
        if len(body) > MAX_MESSAGE_BYTES:  # which the other end would not read
            _log.error("a message of %d bytes, at most %d can be sent", len(body), MAX_MESSAGE_BYTES)
            raise StreamLost(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(body)} bytes")
        try:
            self._writer.write(_framed(kind, body))
            await self._writer.drain()
        except OSError as error:
            raise StreamLost(_UNAVAILABLE, f"the connection broke: {error}") from error


def _framed(kind: FrameKind, body: bytes) -> bytes:
    return _HEADER.pack(len(body), kind) + body


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Raises StreamLost, also where the other end is gone without a reason."""
    try:
        length, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise StreamLost(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a frame of {length} bytes")
        return Frame(kind, await reader.readexactly(length))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise StreamLost(_UNAVAILABLE, "the connection broke") from error


async def connect(address: str, method: LinkMethod) -> UnixStream | None:
    """Return a stream to the worker at host:port; None where none of this user listens there within this
    host.
    """
    try:
        connection = _connected(address)
    except OSError:
        return None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=READ_AHEAD_BYTES // 2)
    except OSError as error:
        connection.close()
        raise StreamLost(_UNAVAILABLE, str(error)) from error
    except BaseException:
        connection.close()  # no stream owns it yet
        raise
    stream = UnixStream(reader, writer, method.response)
    await stream.open(method)
    return stream


def _connected(address: str) -> socket.socket:
    """Connect at once, or not at all: a listener whose queue is full is as good as none. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(socket_name(address))
        if not same_user(connection):
            raise PermissionError("another user listens there")
    except OSError:
        connection.close()
        raise
    return connection


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a connected socket runs as this process does."""
    return peer_credentials(connection).uid == os.geteuid()
