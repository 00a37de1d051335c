"""Simulated TCP for the copying transport: bytes in order, or a connection that breaks.

Damage is done here: a bit that flips (past TCP's checksum, as broken memory does), a frame that ends in the
middle, a frame that comes twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtransfer.transports.row_frames import HEADER_BYTES
from tests.simulation.network import Network, Pipe
from tests.simulation.virtual_loop import Host, current_host

HEADER = 36  # bytes of the header of a frame of blocks


class Connection:
    """A connection from a writer's socket to a receiver's protocol."""

    def __init__(self, sockets: Sockets, client: Host, listener: Listener) -> None:
        self.sockets, self.client, self.server = sockets, client, listener.host
        self.ends = (client.name, listener.host.name)
        network = sockets.network
        name = f"{client.name}>{listener.host.name}/data/{network.opened((*self.ends,))}"
        self._up = Pipe(network, name + "/up", self.ends, listener.host, client)
        self._down = Pipe(network, name + "/down", self.ends, client, listener.host)
        self.broken = False  # as the client knows
        self.received: Any = asyncio.Queue()  # of bytes; `b""` is the end
        self.unread = 0
        """Bytes on their way to the server, or not read there."""
        self.on_room: Callable[[], None] = lambda: None
        self._written = b""
        self.protocol: Any = None
        self._listener = listener
        self._up.send(self._open)
        client.on_death.append(lambda: self._up.send(self._gone))
        listener.host.on_death.append(lambda: self._down.send(self._reset))

    # -- at the server

    def _open(self) -> None:
        if self._listener.closed:
            self._down.send(self._reset)
            return
        self.protocol = self._listener.factory()
        self.protocol.connection_made(self)

    def write(self, data: bytes | memoryview) -> None:
        data = bytes(data)
        sent = self.sockets.damaged(self, data, self._written)
        self._written = data
        self._down.send(self.received.put_nowait, sent)

    def abort(self) -> None:
        self._listener.open.pop(self, None)
        self._down.send(self._reset)

    def taken(self, size: int) -> None:
        """Let the client send as many more bytes as the server has read."""
        self.unread -= size
        self.on_room()

    def _feed(self, data: bytes) -> None:
        if not isinstance(self.protocol, ReadsLater):
            self.taken(len(data))
        while data and self.protocol is not None:
            buffer = self.protocol.get_buffer(-1)
            taken = min(len(buffer), len(data))
            if not taken:
                return
            buffer[:taken] = data[:taken]
            data = data[taken:]
            self.protocol.buffer_updated(taken)

    def _gone(self) -> None:
        if self.protocol is not None:
            self.protocol.connection_lost(None)

    # -- at the client

    def _reset(self) -> None:
        self.broken = True
        self.received.put_nowait(b"")
        self.on_room()

    def send(self, data: bytes) -> None:
        if self.broken:
            raise ConnectionResetError("the connection broke")
        self.unread += len(data)
        self._up.send(self._feed, data)

    def cut(self) -> None:
        """Close the connection from the client's end, or by the network."""
        self.broken = True
        self._up.send(self._gone)
        self.on_room()

    def reset(self) -> None:
        """Break the connection; each end notices it in its own time."""
        self._down.send(self._reset)
        self._up.send(self._gone)


class SimulatedSocket:
    """A non-blocking client socket, as `kvtransfer.transports.tcp` uses one."""

    network: Sockets

    def __init__(self, *_: object) -> None:
        self._connection: Connection | None = None
        self._before = b""
        self._unread = b""

    def setblocking(self, flag: bool) -> None: ...
    def setsockopt(self, *_: object) -> None: ...
    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        if self._connection is not None:
            self._connection.cut()

    async def connect_to(self, address: Any) -> None:
        await asyncio.sleep(0.0005)
        self._connection = self.network.connect(address)

    async def receive(self, size: int) -> bytes:
        if not self._unread and self._connection is not None:
            self._unread = await self._connection.received.get()
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    async def send_all(self, data: Any) -> None:
        connection = self._connection
        if connection is None:
            raise OSError("not connected")
        payload = bytes(data)
        connection.send(self.network.damaged(connection, payload, self._before))
        self._before = payload
        await asyncio.sleep(0.0001)


class ReadsLater:
    """A protocol at the server that reports what it has read by `Connection.taken`."""


@dataclass
class Damage:
    """The damage to the next frame between two hosts."""

    kind: str  # flip, flip_header, cut, twice
    seed: int


class Listener:
    """Stand-in for the result of `loop.create_server`."""

    def __init__(self, sockets: Sockets, host: Host, factory: Callable[[], Any], port: int) -> None:
        self._sockets, self.host, self.factory, self._port = sockets, host, factory, port
        self.closed = False
        self.open: dict[Connection, None] = {}

    @property
    def sockets(self) -> list[Any]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)

    def close(self) -> None:
        self.closed = True

    async def wait_closed(self) -> None: ...


class Sockets:
    """The listeners, and the damage that waits for a frame."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._listeners: dict[int, Listener] = {}
        self.damage: dict[tuple[str, str], list[Damage]] = {}
        self.damaged_frames = 0

    def listen(self, factory: Callable[[], Any], host: str) -> Listener:
        owner = current_host.get()
        if owner is None:
            raise OSError("no host listens")
        port = 20_000 + len(self._listeners)
        self._listeners[port] = Listener(self, owner, factory, port)
        return self._listeners[port]

    def connect(self, address: tuple[str, int]) -> Connection:
        listener, client = self._listeners.get(address[1]), current_host.get()
        if listener is None or listener.closed or listener.host.dead or client is None:
            raise ConnectionRefusedError("no listener there")
        connection = Connection(self, client, listener)
        listener.open[connection] = None
        return connection

    def open_connections(self) -> list[Connection]:
        """Return the connections that neither end has closed."""
        found = (one for listener in self._listeners.values() for one in listener.open)
        return [one for one in found if not one.broken]

    def damaged(self, connection: Connection, data: bytes, before: bytes) -> bytes:
        """Return the bytes to send instead of `data`, a header or a payload; `before` was sent last."""
        waiting = self.damage.get(connection.ends)
        if not waiting:
            return data
        damage = waiting[0]
        size = HEADER_BYTES if connection.ends[1].startswith("e") else HEADER
        header, payload = len(data) == size, len(before) == size
        if not (header if damage.kind == "flip_header" else payload):
            return data
        waiting.pop(0)
        self.damaged_frames += 1
        if damage.kind == "twice":
            return data + before + data
        place = random.Random(damage.seed).randrange(len(data))
        if damage.kind == "cut":
            self.network.loop.call_soon(connection.cut)
            return data[:place]
        return data[:place] + bytes([data[place] ^ 1 << damage.seed % 8]) + data[place + 1 :]
