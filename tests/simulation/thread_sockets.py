"""Sockets and pipes that threads wait for, over the simulated network.

They stand in for the blocking ends of `socket`, and for `multiprocessing.connection.Connection`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from tests.simulation.network import Network, Pipe
from tests.simulation.sockets import Connection, Listener, ReadsLater, Sockets
from tests.simulation.virtual_loop import Host
from tests.simulation.virtual_threads import Queue, VirtualThreads

WINDOW_BYTES = 512
"""Bytes of one connection that the kernels of both ends keep unread; a sender of more waits."""
_LARGEST_READ = 4096


class ThreadSockets:
    """Stand-in for the module `socket`, as threads use it."""

    AF_INET, AF_INET6, IPPROTO_TCP, TCP_NODELAY, SHUT_RDWR = 2, 10, 6, 1, 2
    socket = object

    def __init__(self, threads: VirtualThreads, sockets: Sockets) -> None:
        self._threads, self._sockets = threads, sockets

    def create_server(self, address: tuple[str, int], **_: Any) -> ListeningSocket:
        """Listen on a port of this process' host. Raises OSError."""
        return ListeningSocket(self._threads, self._sockets, address[0])

    def create_connection(self, address: tuple[str, int], timeout: float) -> ClientSocket:
        """Connect. Raises OSError."""
        self._threads.sleep(0.0005)
        return ClientSocket(self._threads, self._sockets, self._sockets.connect(address), timeout)


class ListeningSocket:
    """A socket whose connections a thread accepts."""

    def __init__(self, threads: VirtualThreads, sockets: Sockets, host: str) -> None:
        self._accepted = Queue(threads)
        self._listener: Listener = sockets.listen(lambda: AcceptedSocket(threads, self._accepted.put), host)

    def getsockname(self) -> tuple[str, int]:
        return self._listener.getsockname()

    def accept(self) -> tuple[AcceptedSocket, None]:
        return self._accepted.get(), None

    def close(self) -> None:
        self._listener.close()


class _ThreadSocket:
    """One end of a connection, as a thread reads it."""

    def __init__(self, threads: VirtualThreads, timeout: float | None = None) -> None:
        self.threads, self.timeout = threads, timeout
        self.arrived = Queue(threads)
        """Bytes; `b""` is the end."""
        self._unread = b""
        self._ended = False

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def setsockopt(self, *_: object) -> None: ...

    def recv_into(self, buffer: memoryview) -> int:
        """Return the number of bytes that were read, 0 at the end. Raises TimeoutError."""
        if not self._unread and not self._ended:
            self._unread = self.arrived.get(self.timeout)
            self._ended = not self._unread
        count = min(len(self._unread), buffer.nbytes)
        buffer[:count], self._unread = self._unread[:count], self._unread[count:]
        self.has_read(count)
        return count

    def has_read(self, size: int) -> None: ...
    def close(self) -> None: ...

    def shutdown(self, how: int) -> None:
        self.close()
        self.arrived.put(b"")

    def __enter__(self) -> _ThreadSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AcceptedSocket(_ThreadSocket, ReadsLater):
    """The server's end: a protocol for the network, a socket for a thread."""

    def __init__(self, threads: VirtualThreads, accepted: Callable[[AcceptedSocket], None]) -> None:
        super().__init__(threads)
        self._accepted = accepted
        self._buffer = bytearray(_LARGEST_READ)
        self._connection: Connection | None = None

    def connection_made(self, connection: Connection) -> None:
        self._connection = connection
        self._accepted(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.arrived.put(b"")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        self.arrived.put(bytes(self._buffer[:size]))

    def has_read(self, size: int) -> None:
        if self._connection is not None:
            self._connection.taken(size)

    def sendall(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.write(data)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()


class ClientSocket(_ThreadSocket):
    """The client's end."""

    def __init__(
        self, threads: VirtualThreads, sockets: Sockets, connection: Connection, timeout: float | None
    ) -> None:
        super().__init__(threads, timeout)
        self._sockets, self._connection = sockets, connection
        connection.received = self.arrived
        self._before = b""
        self._room = Queue(threads)
        connection.on_room = lambda: self._room.put(None)

    def sendall(self, data: bytes | memoryview) -> None:
        """Return when the kernel has the bytes. Raises OSError."""
        connection, payload = self._connection, bytes(data)
        while connection.unread > WINDOW_BYTES and not connection.broken:
            self._room.get(self.timeout)
        connection.send(self._sockets.damaged(connection, payload, self._before))
        self._before = payload
        self.threads.sleep(0.0001)

    def close(self) -> None:
        self._connection.cut()


class PipeEnd:
    """Stand-in for a `multiprocessing.connection.Connection`: messages in order, or the end."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._arrived = Queue(threads)
        self._send: Callable[[bytes], None] = lambda data: None
        self._lost = False

    def send(self, message: object) -> None:
        """Send a message. Raises OSError."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes. Raises OSError."""
        if self._lost:
            raise BrokenPipeError("the other end is gone")
        self._send(bytes(data))

    def recv(self) -> Any:
        """Return the next message. Raises EOFError."""
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self, most: int | None = None) -> bytes:
        """Return the next bytes. Raises EOFError."""
        data: bytes | None = self._arrived.get()
        if data is None:
            self._arrived.put(None)
            raise EOFError("the other end is gone")
        return data

    def lose(self) -> None:
        """Take the end of the other process, or of the connection."""
        self._lost = True
        self._arrived.put(None)

    def take(self, data: bytes) -> None:
        """Take bytes of the other end, unless the connection has ended."""
        if not self._lost:
            self._arrived.put(data)

    def lead_to(self, other: PipeEnd, pipe: Pipe) -> None:
        """Send to another end from now on."""
        self._send = lambda data: pipe.send(other.take, data)


def make_pipe(
    network: Network, threads: VirtualThreads, one: Host, other: Host, *, one_machine: bool
) -> tuple[PipeEnd, PipeEnd]:
    """Return the ends of a connection between two processes, which notice each other's death."""
    ends = (one.name, other.name)
    name = f"{one.name}>{other.name}/pipe/{network.opened(ends)}"
    here, there = PipeEnd(threads), PipeEnd(threads)
    down = Pipe(network, name + "/down", ends, other, None if one_machine else one)
    up = Pipe(network, name + "/up", ends, one, None if one_machine else other)
    here.lead_to(there, down)
    there.lead_to(here, up)
    one.on_death.append(lambda: down.send(there.lose))
    other.on_death.append(lambda: up.send(here.lose))
    return here, there
