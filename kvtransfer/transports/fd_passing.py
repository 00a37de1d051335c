"""Registration of processes that map another one's memory, over an abstract Unix socket of sequenced packets.

    writer  → token of the welcome
    decode  → "map:" and the pool's handle, with file descriptors    (after token, uid and pid were checked)
    writer  → "mapped"                                               (so it lived when its pidfd was taken)
    decode  → "registered"

Prefill workers that read rows of an encode worker's region (row_region.py) register likewise.

The socket, which leaves no file behind, is closed then. From here on only the death of the process proves
that it stopped writing (registered_writers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from diptych.runtime.peer_credentials import peer_credentials
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import Admission, TransportError
from kvtransfer.transports.memory_mapping import ExportedPool
from kvtransfer.transports.registered_writers import TOKEN_BYTES, MappingProcess, RegisteredWriters
from kvtransfer.transports.writer_process import WriterProcess

_REGISTRATION_S = 2.0
_HANDLE_BYTES = 1024
_MAX_FDS = 4
_MAP = b"map:"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Admissions(Protocol):
    """Processes that may register at a socket."""

    def take(self, token: bytes, pid: int) -> WriterId:
        """Return the writer that the process `pid` registers as. Raises TransportError."""
        ...

    async def keep(self, writer: WriterId, process: MappingProcess) -> None:
        """Register a process, which has mapped the memory. Raises TransportError."""
        ...

    def registration_over(self, writer: WriterId) -> None:
        """Take the end of a registration that `take` began, kept or not."""
        ...


class RegistrationSocket:
    """Listening socket that sends the result of `export` to admitted processes of this user."""

    def __init__(
        self, export: Callable[[WriterId], ExportedPool], admissions: Admissions, token_bytes: int
    ) -> None:
        """Take `export`, which runs off the event loop and may raise OSError and TransportError."""
        self._export, self._admissions, self._token_bytes = export, admissions, token_bytes
        self._listener: socket.socket | None = None
        self._path = f"diptych-{secrets.token_hex(16)}"
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind("\0" + self._path)
        listener.listen(64)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @."""
        return "@" + self._path

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if peer_credentials(connection).uid != os.geteuid():
            connection.close()
            return
        connection.settimeout(_REGISTRATION_S)
        task = asyncio.create_task(self._register(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _register(self, connection: socket.socket) -> None:
        process: WriterProcess | None = None
        writer: WriterId | None = None
        with connection:
            try:
                token = await asyncio.to_thread(connection.recv, self._token_bytes + 1)
                writer = self._admissions.take(token, peer_credentials(connection).pid)
                process = WriterProcess.of_peer(connection)
                exported = await asyncio.to_thread(self._export, writer)
                socket.send_fds(connection, [_MAP + exported.handle], exported.fds)
                if await asyncio.to_thread(connection.recv, 16) != b"mapped":
                    raise TransportError("the writer did not map the pool")
                kept, process = process, None
                await self._admissions.keep(writer, kept)
                connection.send(b"registered")
            except (OSError, TransportError) as error:
                _log.warning("a registration for shared memory failed: %s", error)
            finally:
                if process is not None:
                    process.close()
                if writer is not None:
                    self._admissions.registration_over(writer)


class PoolFdSocket:
    """Listening socket that sends the result of `export` to admitted writers, and keeps a pidfd of each."""

    def __init__(self, export: Callable[[WriterId], ExportedPool], dead: Callable[[WriterId], None]) -> None:
        """Take `export`, which runs off the event loop, and `dead`, which is called on it.

        `export` may raise OSError and TransportError.
        """
        self._writers = RegisteredWriters(dead)
        self._socket = RegistrationSocket(export, self, TOKEN_BYTES)

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await self._socket.start()

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @."""
        return self._socket.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let the process `pid` register as `writer`; return the token."""
        return self._writers.admit(writer, [pid])[0]

    def admit_ranks(self, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
        """Let the processes `pids` register as `writer`, all of them; return the token of each."""
        return self._writers.admit(writer, pids)

    def registered(self, writer: WriterId) -> bool:
        """Return True if all processes of this writer map the pool, as far as this process knows."""
        return self._writers.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Kill the writer's processes; `dead` follows."""
        self._writers.fence(writer)

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        await self._socket.close()
        self._writers.close()

    def take(self, token: bytes, pid: int) -> WriterId:
        """See `Admissions.take`."""
        return self._writers.take(token, pid)

    async def keep(self, writer: WriterId, process: MappingProcess) -> None:
        """See `Admissions.keep`."""
        self._writers.keep(writer, process)

    def registration_over(self, writer: WriterId) -> None:
        """Do nothing: what is exported is the same for all writers."""


async def register(welcome: Admission, mapped: Callable[[ExportedPool], T]) -> T:
    """Register with another worker and return the result of `mapped`.

    `mapped` is called with the exported memory off the event loop. The file descriptors are closed on return.
    Raises TransportError.
    """
    return await asyncio.to_thread(register_blocking, welcome, mapped)


def register_blocking(welcome: Admission, mapped: Callable[[ExportedPool], T]) -> T:
    """Register as `register` does, on the calling thread. Raises TransportError."""
    if not welcome.endpoint.startswith("@"):
        raise TransportError(f"the endpoint of the {welcome.role} worker is not an abstract socket")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(_REGISTRATION_S)
        try:
            connection.connect("\0" + welcome.endpoint[1:])
            connection.send(welcome.token)
            message, fds, _, _ = socket.recv_fds(connection, _HANDLE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                stack.callback(os.close, fd)
            if not message.startswith(_MAP):
                raise TransportError(f"the {welcome.role} worker refused the registration")
            result = mapped(ExportedPool(message.removeprefix(_MAP), fds))
            connection.send(b"mapped")
            if connection.recv(16) != b"registered":
                raise TransportError(f"the {welcome.role} worker did not confirm the registration")
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map the {welcome.role} worker's memory: {error}") from error
        return result
