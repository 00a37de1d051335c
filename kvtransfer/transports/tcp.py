"""TCP: blocks are copied over a data socket of their own and checked before they touch the pool.

    writer → token of the welcome    decode → one byte when it is accepted
    writer → frame*    frame = slot u32, generation u64, index u32, length u32, digest, bytes

A frame is read into a staging buffer; it is copied into its block only if its grant is open at this moment
and its bytes match the digest, which binds them to request, grant and place. So stale or damaged data never
reaches the pool, and closing the socket is proof that nothing more can. Frames are not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
from typing import cast

from kvtransfer.digest import DIGEST_BYTES, block_digest
from kvtransfer.messages import GrantRef, WriterId
from kvtransfer.transports.base import ReceiverHooks, TransportError, Welcome

NAME = "tcp"
_HEADER = struct.Struct(f"<IQII{DIGEST_BYTES}s")
_TOKEN_BYTES = 32
_REGISTRATION_S = 2.0
_ACCEPTED = b"+"
_log = logging.getLogger(__name__)


class TcpReceiver:
    """The decode worker's end: one listener, one data socket a writer."""

    name = NAME
    in_place = False

    def __init__(self, host: str, bytes_per_block: int, hooks: ReceiverHooks) -> None:
        self._host = host
        self.bytes_per_block = bytes_per_block
        self.hooks = hooks
        self._server: asyncio.Server | None = None
        self._admitted: dict[bytes, WriterId] = {}
        self._connections: dict[WriterId, _DataConnection] = {}

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _DataConnection(self), self._host, 0)

    @property
    def endpoint(self) -> str:
        """host:port."""
        if self._server is None:
            raise TransportError("not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let whoever shows the token write as `writer`; the pid means nothing across hosts."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        for old in [t for t, admitted in self._admitted.items() if admitted == writer]:
            del self._admitted[old]
        self._admitted[token] = writer
        return token

    def registered(self, writer: WriterId) -> bool:
        """Whether its data socket is open."""
        return writer in self._connections

    def fence(self, writer: WriterId) -> None:
        """Close the data socket, which is the proof."""
        connection = self._connections.get(writer)
        if connection is not None:
            connection.end()

    def link_lost(self, writer: WriterId) -> None:
        """Without a stream the data has no meaning: close it."""
        self.fence(writer)

    async def close(self) -> None:
        """Stop listening and close every data socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.end()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def accept(self, token: bytes, connection: _DataConnection) -> WriterId | None:
        """The writer whose token this is; it can be shown once."""
        for known, writer in self._admitted.items():
            if hmac.compare_digest(known, token):
                del self._admitted[known]
                earlier = self._connections.get(writer)
                if earlier is not None:
                    earlier.end()
                self._connections[writer] = connection
                return writer
        return None

    def ended(self, writer: WriterId, connection: _DataConnection) -> None:
        """A data socket is closed for us: not one byte of it will be copied any more."""
        if self._connections.get(writer) is connection:
            del self._connections[writer]
            self.hooks.dead(writer)


class _DataConnection(asyncio.BufferedProtocol):
    """Reads token, then header and payload in turn, straight into their buffers."""

    def __init__(self, receiver: TcpReceiver) -> None:
        self._receiver = receiver
        self._transport: asyncio.Transport | None = None
        self._writer: WriterId | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._header = memoryview(bytearray(max(_HEADER.size, _TOKEN_BYTES)))
        self._staging = memoryview(bytearray(0))
        self._frame: tuple[int, int, int, bytes] | None = None
        self._target = self._header[:_TOKEN_BYTES]
        self._filled = 0
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the type.
        self._transport = cast("asyncio.Transport", transport)
        # Frees nothing: a socket that never says who it is holds nothing but itself.
        self._deadline = asyncio.get_running_loop().call_later(_REGISTRATION_S, self.end)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._over or self._filled < self._target.nbytes:
            return
        if self._writer is None:
            self._authenticate()
        elif self._frame is None:
            self._start_frame()
        else:
            self._finish_frame(self._writer, *self._frame)

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        """Read and copy nothing more, from this moment on."""
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._writer is not None:
            self._receiver.ended(self._writer, self)

    def _read(self, target: memoryview) -> None:
        self._target, self._filled = target, 0

    def _authenticate(self) -> None:
        self._writer = self._receiver.accept(bytes(self._target), self)
        if self._writer is None or self._transport is None:
            _log.warning("a data connection showed an unknown token")
            self.end()
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._staging = memoryview(bytearray(self._receiver.bytes_per_block))
        self._transport.write(_ACCEPTED)
        self._read(self._header[: _HEADER.size])

    def _start_frame(self) -> None:
        slot, generation, index, length, digest = _HEADER.unpack(self._target)
        if length != self._staging.nbytes:
            _log.error("a data connection sent a block of %d bytes", length)
            self.end()
            return
        self._frame = (slot, generation, index, digest)
        self._read(self._staging)

    def _finish_frame(self, writer: WriterId, slot: int, generation: int, index: int, digest: bytes) -> None:
        self._frame = None
        self._read(self._header[: _HEADER.size])
        hooks = self._receiver.hooks
        ref = hooks.named(writer, slot, generation)
        destination = None if ref is None else hooks.destination(writer, ref, index)
        if ref is None or destination is None:
            return
        if block_digest(ref, index, self._staging) != digest:
            hooks.corrupt(writer, ref)
            return
        destination[:] = self._staging
        hooks.arrived(writer, ref, index, digest)


class TcpChannel:
    """The prefill worker's end: one data socket to one decode worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, welcome: Welcome) -> TcpChannel:
        """Connect and register. Raises TransportError."""
        host, port = _endpoint(welcome)
        loop = asyncio.get_running_loop()
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(_REGISTRATION_S):
                family, kind, proto, _, address = (
                    await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )[0]
                connection = socket.socket(family, kind, proto)
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(connection, address)
                await loop.sock_sendall(connection, welcome.token)
                if await loop.sock_recv(connection, 1) != _ACCEPTED:
                    raise TransportError("the decode worker refused the data connection")
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, (OSError, TimeoutError)):
                raise TransportError(f"no data connection to the decode worker: {error}") from error
            raise
        return cls(connection)

    async def send(self, ref: GrantRef, index: int, payload: memoryview, digest: bytes) -> None:
        """Send one block; returns when its bytes are the kernel's. Raises TransportError."""
        loop = asyncio.get_running_loop()
        header = _HEADER.pack(ref.slot, ref.generation, index, payload.nbytes, digest)
        try:
            await loop.sock_sendall(self._connection, header)
            await loop.sock_sendall(self._connection, payload)
        except (OSError, ValueError) as error:
            raise TransportError(f"the data connection broke: {error}") from error

    def close(self) -> None:
        """Send no more. Call it when no `send` runs."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _endpoint(welcome: Welcome) -> tuple[str, int]:
    """A listener on all addresses is reached at the one where its gRPC server was."""
    host, _, port = welcome.endpoint.rpartition(":")
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = welcome.address.rpartition(":")[0].strip("[]")
    return host, int(port)
