"""Receiving end of transports whose data comes by sockets: a token, then frames one way, counts back.

    writer → token of the welcome                     decode → a greeting when it is accepted
    writer → frame*, as its transport arranges them   decode → count*, of blocks taken or dropped so far

Closing a data socket is the fence, and the proof: nothing that it brought is copied from that moment on.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import Callable
from typing import Protocol, cast

from diptych.runtime.bind_address import join_host_port
from diptych.runtime.internal_tls import InternalTls, NotTrusted, names_in, require_role
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError

TOKEN_BYTES = 32
REGISTRATION_S = 2.0
_WRITER = "prefill"
"""Role of who writes."""
COUNT = struct.Struct("<Q")
"""Number of blocks taken or dropped since the socket was opened."""
_log = logging.getLogger(__name__)


class FrameReader(Protocol):
    """Reader of the frames of one data socket, into buffers of its own."""

    def greeting(self) -> bytes:
        """Return the bytes that an accepted writer is sent, of a fixed length."""
        ...

    def first_buffer(self) -> memoryview:
        """Return the buffer to be filled first."""
        ...

    def buffer_filled(self) -> memoryview:
        """Take the full buffer, return the next one to fill. Raises TransportError to end the socket."""
        ...

    def ended(self) -> None:
        """Take the end of the frames."""
        ...


class DataListener:
    """Listening socket with one data socket a writer; with `tls` only for prefill workers' certificates."""

    def __init__(
        self,
        host: str,
        open_reader: Callable[[WriterId, DataSocket], FrameReader],
        dead: Callable[[WriterId], None],
        *,
        reusable_tokens: bool = False,
        tls: InternalTls | None = None,
    ) -> None:
        self.tls = tls
        self.host = host
        self.open_reader = open_reader
        self._dead = dead
        self._reusable_tokens = reusable_tokens
        self._server: asyncio.Server | None = None
        self._admitted: dict[bytes, WriterId] = {}
        self._sockets: dict[WriterId, DataSocket] = {}

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        loop = asyncio.get_running_loop()
        context = None if self.tls is None else self.tls.server_context()
        self._server = await loop.create_server(
            lambda: DataSocket(self),
            self.host,
            0,
            ssl=context,
            ssl_handshake_timeout=None if context is None else REGISTRATION_S,
        )

    @property
    def endpoint(self) -> str:
        """Address as host:port."""
        if self._server is None:
            raise TransportError("not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return join_host_port(host, port)

    def admit(self, writer: WriterId) -> bytes:
        """Let the process that shows the returned token, once unless tokens are reusable, act as `writer`."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expire_tokens(writer)
        self._admitted[token] = writer
        return token

    def expel(self, writer: WriterId) -> None:
        """Admit this writer no more, and close its data socket, if it has one."""
        self._expire_tokens(writer)
        self.end_socket(writer)

    def registered(self, writer: WriterId) -> bool:
        """Return True while the data socket of the writer is open."""
        return writer in self._sockets

    def end_socket(self, writer: WriterId) -> None:
        """Close the writer's data socket, if it has one: `dead` follows before this returns."""
        connection = self._sockets.get(writer)
        if connection is not None:
            connection.end()

    async def close(self) -> None:
        """Stop listening and close every data socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._sockets.values()):
            connection.end()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def accept(self, token: bytes, connection: DataSocket) -> WriterId | None:
        """Return the writer whose token this is, None for an unknown token."""
        for known, writer in self._admitted.items():
            if hmac.compare_digest(known, token):
                if not self._reusable_tokens:
                    del self._admitted[known]
                self.end_socket(writer)
                self._sockets[writer] = connection
                return writer
        return None

    def _expire_tokens(self, writer: WriterId) -> None:
        for old in [t for t, admitted in self._admitted.items() if admitted == writer]:
            del self._admitted[old]

    def ended(self, writer: WriterId, connection: DataSocket) -> None:
        """Report the writer of a closed data socket dead."""
        if self._sockets.get(writer) is connection:
            del self._sockets[writer]
            self._dead(writer)


class DataSocket(asyncio.BufferedProtocol):
    """Data socket of one writer: reads the token, then frames, straight into their buffers."""

    def __init__(self, listener: DataListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._writer: WriterId | None = None
        self._reader: FrameReader | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._target = memoryview(bytearray(TOKEN_BYTES))
        self._filled = 0
        self._taken = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self.closed = False
        """True once nothing that it brought may be copied any more."""

    def acknowledge(self, blocks: int) -> None:
        """Send the count after `blocks` more blocks were taken or dropped."""
        self._taken += blocks
        if self._transport is not None and not self.closed:
            self._transport.write(COUNT.pack(self._taken))

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes, once the other end has read enough of those before; they must not change after it.

        Raises TransportError if closed.
        """
        await self._writable.wait()
        if self.closed or self._transport is None:
            raise TransportError("the data socket is closed")
        for part in parts:
            self._transport.write(part)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def local_host(self) -> str:
        """Return the address of this end."""
        if self._transport is None:
            raise TransportError("not connected")
        return str(self._transport.get_extra_info("sockname")[0])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the type.
        self._transport = cast("asyncio.Transport", transport)
        # Frees no block: a socket without a token holds nothing but itself.
        self._deadline = asyncio.get_running_loop().call_later(REGISTRATION_S, self.end)
        if self._listener.tls is not None:
            try:
                require_role(names_in(transport.get_extra_info("ssl_object")), _WRITER)
            except NotTrusted as error:
                _log.warning("a data connection from %s: %s", transport.get_extra_info("peername"), error)
                self.end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self.closed or self._filled < self._target.nbytes:
            return
        if self._reader is None:
            self._authenticate()
            return
        try:
            self._target, self._filled = self._reader.buffer_filled(), 0
        except TransportError as error:
            _log.error("%s", error)
            self.end()

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        """Read nothing more, from this moment on."""
        if self.closed:
            return
        self.closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        if self._reader is not None:
            self._reader.ended()
        if self._writer is not None:
            self._listener.ended(self._writer, self)

    def _authenticate(self) -> None:
        self._writer = self._listener.accept(bytes(self._target), self)
        if self._writer is None or self._transport is None:
            _log.warning("a data connection showed an unknown token")
            self.end()
            return
        if self._deadline is not None:
            self._deadline.cancel()
        try:
            self._reader = self._listener.open_reader(self._writer, self)
        except TransportError as error:
            _log.error("%s", error)
            self.end()
            return
        self._transport.write(self._reader.greeting())
        self._target, self._filled = self._reader.first_buffer(), 0


OpenFrames = Callable[[WriterId, DataSocket], FrameReader]


def always_reachable(writer: Locality) -> str | None:
    """Return None: a socket reaches every locality."""
    return None


class SocketReceiver:
    """Receiving end with one data socket for each writer.

    Args:
        open_reader: makes the reader of a writer's frames.
        unreachable: returns why a writer at a locality cannot use the transport, None if it can.
    """

    in_place = False

    def __init__(
        self,
        name: str,
        host: str,
        open_reader: OpenFrames,
        hooks: ReceiverHooks,
        unreachable: Callable[[Locality], str | None] = always_reachable,
        *,
        tls: InternalTls | None = None,
    ) -> None:
        self.name = name
        self.unreachable_reason = unreachable
        self._listener = DataListener(host, open_reader, hooks.dead, tls=tls)

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        await self._listener.start()

    @property
    def endpoint(self) -> str:
        """Address of the data sockets as host:port."""
        return self._listener.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let the process that shows the returned token write as `writer`; pids mean nothing across hosts."""
        return self._listener.admit(writer)

    def registered(self, writer: WriterId) -> bool:
        """Return True while the data socket of the writer is open."""
        return self._listener.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Close the data socket, which is the proof, and admit no other one by an earlier token."""
        self._listener.expel(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Do nothing: the frames themselves show what arrived."""

    def link_lost(self, writer: WriterId) -> None:
        """Close the data socket: without a stream the data has no meaning."""
        self._listener.end_socket(writer)

    async def close(self) -> None:
        """Stop listening and end every data socket."""
        await self._listener.close()
