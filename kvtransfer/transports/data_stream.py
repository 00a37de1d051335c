"""Bytes of a data connection: as they are, or through TLS.

asyncio's TLS transports copy what they read once more, and have no call that returns when the kernel has the
bytes. So records are made and read here, on a socket that belongs to the caller.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol, cast

from diptych.runtime.internal_tls import InternalTls, name_of

_CHUNK_BYTES = 256 << 10
"""Bytes that are read from the socket, or encrypted, at once: the event loop waits for no more."""


class DataStream(Protocol):
    """Byte stream both ways; one task reads and one writes."""

    async def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has taken the bytes. Raises OSError."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Return the number of bytes that came, 0 at the end. Raises OSError."""
        ...


class PlainStream:
    """Bytes of a connected, non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has taken the bytes. Raises OSError."""
        await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def receive_into(self, buffer: memoryview) -> int:
        """Return the number of bytes that came, 0 at the end. Raises OSError."""
        return await asyncio.get_running_loop().sock_recv_into(self._connection, buffer)


class TlsStream:
    """TLS over such a socket, whose other end is a worker of a role."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, role: str) -> None:
        self._wire = PlainStream(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name_of(role))
        self._received = memoryview(bytearray(_CHUNK_BYTES))
        self._writing = asyncio.Lock()  # records go out in the order in which they were made

    @classmethod
    async def connect(cls, connection: socket.socket, tls: InternalTls, role: str) -> TlsStream:
        """Shake hands with a worker in `role`. Raises OSError, of which ssl.SSLError is one."""
        stream = cls(connection, tls.client_context(), role)
        while True:
            try:
                stream._tls.do_handshake()
            except ssl.SSLWantReadError:
                await stream._flush()
                if not await stream._receive():
                    raise ConnectionResetError("the other end closed in the TLS handshake") from None
            else:
                await stream._flush()
                return stream

    async def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has taken the encrypted bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        async with self._writing:
            for at in range(0, view.nbytes, _CHUNK_BYTES):
                part = view[at : at + _CHUNK_BYTES]
                while part.nbytes:  # a memory BIO takes all; a record may be written alone
                    part = part[self._tls.write(part) :]
                await self._wire.send(self._outgoing.read())

    async def receive_into(self, buffer: memoryview) -> int:
        """Return the number of bytes that came, 0 at the end. Raises OSError."""
        while True:
            try:
                return cast(int, self._tls.read(buffer.nbytes, buffer))  # its stub knows the other form only
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            if self._outgoing.pending:
                await self._flush()  # an answer to a change of keys

    async def _receive(self) -> int:
        """Read what came into the TLS state; return the number of bytes, 0 at the end."""
        count = await self._wire.receive_into(self._received)
        self._incoming.write(self._received[:count])
        return count

    async def _flush(self) -> None:
        async with self._writing:
            if self._outgoing.pending:
                await self._wire.send(self._outgoing.read())
