"""Shared memory: the decode pool is a memfd, and the prefill worker computes straight into granted blocks.

Registration, over a Unix socket of sequenced packets in the abstract namespace (no file to leave behind):

    writer  → token of the welcome
    decode  → "map", with the memfd attached    (after the token, uid and pid were checked)
    writer  → "mapped"                          (so it lived when its pidfd was taken)
    decode  → "registered"

The socket is closed then. From here on only the death of the process proves that it stopped writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
from dataclasses import dataclass

from engine.kv_memory import KVMemory
from kvtransfer.fence import WriterProcess, peer_credentials
from kvtransfer.host import host_id
from kvtransfer.messages import GrantRef, WriterId
from kvtransfer.pool_memory import PoolMemory, map_pool
from kvtransfer.transports.base import Place, ReceiverHooks, TransportError, Welcome

NAME = "shared_memory"
_REGISTRATION_S = 2.0
_TOKEN_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Admission:
    writer: WriterId
    pid: int


class SharedMemoryReceiver:
    """The decode worker's end: gives its memfd to admitted writers and keeps a pidfd of each."""

    name = NAME
    in_place = True

    def __init__(self, pool: PoolMemory, hooks: ReceiverHooks) -> None:
        self._pool = pool
        self._host_id = host_id()
        self._hooks = hooks
        self._listener: socket.socket | None = None
        self._path = f"diptych-{secrets.token_hex(16)}"
        self._admitted: dict[bytes, _Admission] = {}
        self._writers: dict[WriterId, WriterProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def unreachable(self, writer: Place) -> str | None:
        """It has to be a process of this host."""
        return None if writer.host_id == self._host_id else "on another host"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind("\0" + self._path)
        listener.listen(64)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    @property
    def endpoint(self) -> str:
        """The socket's abstract name behind an @."""
        return "@" + self._path

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let the process `pid` register as `writer`."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        for old in [t for t, admission in self._admitted.items() if admission.writer == writer]:
            del self._admitted[old]
        self._admitted[token] = _Admission(writer, pid)
        return token

    def registered(self, writer: WriterId) -> bool:
        """Whether it maps our pool, as far as we know."""
        return writer in self._writers

    def fence(self, writer: WriterId) -> None:
        """Kill the process; `dead` follows."""
        process = self._writers.get(writer)
        if process is None:
            return
        try:
            process.kill()
        except (ValueError, OSError) as error:
            _log.error("cannot fence prefill worker %s (pid %d): %s", writer.worker_id, process.pid, error)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """They were computed in place."""

    def link_lost(self, writer: WriterId) -> None:
        """Proves nothing: the process may still write."""

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._writers.values():
            process.close()
        self._writers.clear()

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
        with connection:
            try:
                token = await asyncio.to_thread(connection.recv, _TOKEN_BYTES + 1)
                admission = self._take_admission(token, peer_credentials(connection).pid)
                process = WriterProcess.of_peer(connection)
                socket.send_fds(connection, [b"map"], [self._pool.fd])
                if await asyncio.to_thread(connection.recv, 16) != b"mapped":
                    raise TransportError("the writer did not map the pool")
                self._keep(admission.writer, process)
                process = None
                connection.send(b"registered")
            except (OSError, TransportError) as error:
                _log.warning("a registration for shared memory failed: %s", error)
            finally:
                if process is not None:
                    process.close()

    def _take_admission(self, token: bytes, pid: int) -> _Admission:
        for known, admission in self._admitted.items():
            if hmac.compare_digest(known, token):
                del self._admitted[known]
                if admission.pid != pid:
                    raise TransportError("another process than the one of the hello")
                return admission
        raise TransportError("an unknown token")

    def _keep(self, writer: WriterId, process: WriterProcess) -> None:
        earlier = self._writers.pop(writer, None)
        if earlier is not None:
            earlier.close()  # the same process again: the hello's pid was checked both times
        self._writers[writer] = process

        def dead() -> None:
            del self._writers[writer]
            self._hooks.dead(writer)

        process.watch(dead)


async def open_shared_memory(welcome: Welcome) -> KVMemory:
    """Register with a decode worker and map its pool. Raises TransportError."""
    return await asyncio.to_thread(_open, welcome)


def _open(welcome: Welcome) -> KVMemory:
    if not welcome.endpoint.startswith("@"):
        raise TransportError("the endpoint for shared memory is not an abstract socket")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(_REGISTRATION_S)
        try:
            connection.connect("\0" + welcome.endpoint[1:])
            connection.send(welcome.token)
            _, fds, _, _ = socket.recv_fds(connection, 16, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                stack.callback(os.close, fd)
            if len(fds) != 1:
                raise TransportError("the decode worker refused the registration")
            memory = map_pool(fds[0], welcome.layout, welcome.num_blocks)
            connection.send(b"mapped")
            if connection.recv(16) != b"registered":
                raise TransportError("the decode worker did not confirm the registration")
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map the decode worker's pool: {error}") from error
        return memory
