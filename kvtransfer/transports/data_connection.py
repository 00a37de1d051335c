"""Data connection of the prefill worker: connect, show the token, send, read how many blocks arrived.

Where the welcome has certificates, everything goes through TLS, the token included.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from kvtransfer.transports.base import Admission, TransportError
from kvtransfer.transports.data_listener import COUNT, REGISTRATION_S
from kvtransfer.transports.data_stream import DataStream, PlainStream, TlsStream


class DataConnection:
    """Data socket to one worker; `counts`: the other end sends counts, and the owner reads nothing."""

    def __init__(
        self, connection: socket.socket, stream: DataStream, greeting: bytes, *, counts: bool = True
    ) -> None:
        self.greeting = greeting
        self.acknowledged = 0
        """Number of blocks that the other end has taken or dropped."""
        self.broken = False
        """True if the other end is gone."""
        self._connection, self._stream = connection, stream
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read_counts()) if counts else None

    @classmethod
    async def open(cls, welcome: Admission, greeting_bytes: int, *, counts: bool = True) -> DataConnection:
        """Connect and register. Raises TransportError."""
        host, port = endpoint_address(welcome)
        loop = asyncio.get_running_loop()
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(REGISTRATION_S):
                family, kind, proto, _, address = (
                    await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )[0]
                connection = socket.socket(family, kind, proto)
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(connection, address)
                stream: DataStream = PlainStream(connection)
                if welcome.tls is not None:
                    stream = await TlsStream.connect(connection, welcome.tls, welcome.role)
                await stream.send(welcome.token)
                greeting = await _receive(stream, greeting_bytes)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, (OSError, TimeoutError)):
                raise TransportError(f"no data connection to the {welcome.role} worker: {error}") from error
            raise
        return cls(connection, stream, greeting, counts=counts)

    def local_host(self) -> str:
        """Return the address of this end."""
        return str(self._connection.getsockname()[0])

    async def send(self, data: bytes | memoryview) -> None:
        """Send bytes; returns when the kernel has taken them. Raises TransportError."""
        try:
            await self._stream.send(data)
        except (OSError, ValueError) as error:
            raise TransportError(f"the data connection broke: {error}") from error

    async def receive_into(self, buffer: memoryview) -> None:
        """Fill `buffer`. Raises TransportError."""
        filled = 0
        try:
            while filled < buffer.nbytes:
                received = await self._stream.receive_into(buffer[filled:])
                if not received:
                    raise TransportError("the other worker closed the data connection")
                filled += received
        except (OSError, ValueError) as error:
            raise TransportError(f"the data connection broke: {error}") from error

    async def until_acknowledged(self, blocks: int) -> None:
        """Wait until so many blocks were acknowledged. Raises TransportError if that cannot come."""
        while self.acknowledged < blocks:
            if self.broken:
                raise TransportError("the other worker closed the data connection")
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """End the connection. Call it when no `send` runs."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._reader is None:
            self._connection.close()
            return
        self._reader.cancel()
        # Not before the reader has left it: its number could be another socket's by then.
        self._reader.add_done_callback(lambda _: self._connection.close())

    async def _read_counts(self) -> None:
        try:
            while True:
                (self.acknowledged,) = COUNT.unpack(await _receive(self._stream, COUNT.size))
                self._changed.set()
        except (OSError, TransportError):
            pass  # `broken` reports it
        finally:
            self.broken = True
            self._changed.set()


async def _receive(stream: DataStream, size: int) -> bytes:
    received, filled = bytearray(size), 0
    while filled < size:
        count = await stream.receive_into(memoryview(received)[filled:])
        if not count:
            raise TransportError("the other worker closed the data connection")
        filled += count
    return bytes(received)


def endpoint_address(welcome: Admission) -> tuple[str, int]:
    """Return host and port of a data listener; one on all addresses has the host of its gRPC server."""
    host, _, port = welcome.endpoint.rpartition(":")
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = welcome.address.rpartition(":")[0].strip("[]")
    return host, int(port)
