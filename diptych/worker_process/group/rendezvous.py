"""Meeting of a group's ranks on several hosts: five TCP connections each, on which both ends prove a secret.

    life      nothing is ever sent; its end is the other process' end, or that of the network between them
    control   orders about memories, as to ranks of this host (orders.py)
    plans     steps, and writes to blocks between them, in order; the answers to steps
    blocks    shares of blocks that rank 0 reads
    shares    what ranks do with shares beside steps: send them to other workers' ranks, and receive theirs

    nonces    32 bytes each way
    proofs    HMAC-SHA256 of the secret over the side's name and both nonces, each way
    greeting  the rank's `Greeting`, pickled: nothing is unpickled before the other end has proven the secret

What follows is neither encrypted nor signed, and neither is what ranks exchange over Gloo: the network
between the hosts of a group must be one that is trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

from diptych.engine.parallel.communicator import GroupBroken

KINDS = ("life", "control", "plans", "blocks", "shares")
PROTOCOL = 3
"""Number of the messages between the processes of a group; another one with every change of them."""
JOIN_S = 300.0
"""Seconds that rank 0 waits for the ranks of other hosts."""
HANDSHAKE_S = 5.0
"""Seconds until the other end must have proven the secret, and as many until its greeting has begun."""
MAX_HANDSHAKES = 64
"""Connections that prove the secret at once. One more ends the oldest: a true rank needs milliseconds."""
LOST_S = 15
"""Seconds without an answer of the other host's kernel after which its processes count as lost."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_log = logging.getLogger(__name__)

Ends: TypeAlias = "Mapping[str, Connection[Any, Any]]"
"""Connections by kind."""


class NotAdmitted(OSError):
    """The other end has another secret, or is no rank of a group."""


@dataclass(frozen=True)
class Greeting:
    """First message of a connection."""

    kind: str
    name: bytes
    """Random, the same in all connections of a process."""
    host: str
    """Address at which the process exchanges numbers with other ranks."""
    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Joined:
    """A process of another host that has all its connections."""

    host: str
    pid: int
    ends: Ends


@dataclass
class _Joining:
    greeting: Greeting
    ends: dict[str, Connection[Any, Any]] = field(default_factory=dict)


class Rendezvous:
    """Rank 0's listening end, open until all ranks have joined."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        """Listen. Raises OSError."""
        self.host, self._key = host, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self.port = int(self._listener.getsockname()[1])

    def accept(self, count: int, timeout_s: float = JOIN_S) -> list[Joined]:
        """Return `count` processes that joined, in the order in which they did, and listen no more.

        Raises GroupBroken when there are fewer within `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        handshakes = _Handshakes(self._key)
        self._listener.setblocking(False)
        try:
            while len(joined := handshakes.joined()) < count:
                left = until - time.monotonic()
                if left <= 0:
                    raise GroupBroken(
                        f"{len(joined)} of {count} ranks of other hosts joined at {self.host}:{self.port} "
                        f"within {timeout_s:.0f} s"
                    )
                # The pipe has a byte for each handshake that ended, which may have been the last that misses.
                ready = wait([self._listener, handshakes.ended], left)
                if handshakes.ended in ready:
                    handshakes.ended.recv_bytes()
                if self._listener in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        handshakes.begin(self._listener.accept()[0])
        finally:
            self._listener.close()
            handshakes.close()
        return [Joined(one.greeting.host, one.greeting.pid, one.ends) for one in joined[:count]]


class _Handshakes:
    """Handshakes of connections, each on a thread of its own: one that stalls keeps no other waiting."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._joining: dict[bytes, _Joining] = {}
        self._open: dict[socket.socket, None] = {}
        """Connections in a handshake, the oldest first."""
        self.ended, self._tell = Pipe(duplex=False)
        """Gets a message at the end of each handshake."""

    def begin(self, connection: socket.socket) -> None:
        """Shake hands with who connected, and end the oldest handshake where there are too many."""
        with self._lock:
            if len(self._open) >= MAX_HANDSHAKES:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its thread sees the end, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[connection] = None
        threading.Thread(target=self._run, args=(connection,), name="handshake", daemon=True).start()

    def joined(self) -> list[_Joining]:
        """Return the processes that have all their connections, and are there."""
        with self._lock:
            return [one for one in self._joining.values() if _is_whole(one)]

    def close(self) -> None:
        """End the handshakes that still run."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()
            self._tell.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            greeting, end = self._shake_hands(connection)
        except (OSError, EOFError) as error:
            _log.warning("a connection to the rendezvous is refused: %s", error)
            greeting = None
        with self._lock:
            self._open.pop(connection, None)
            if greeting is not None:
                self._joining.setdefault(greeting.name, _Joining(greeting)).ends[greeting.kind] = end
            if not self._tell.closed:
                self._tell.send_bytes(b"ended")

    def _shake_hands(self, connection: socket.socket) -> tuple[Greeting, Connection[Any, Any]]:
        """Return what another end greets with, once it has proven the secret. Raises OSError, EOFError."""
        end = _open(connection, self._key, b"rank-0", b"rank")
        try:
            if not end.poll(HANDSHAKE_S):
                raise NotAdmitted("the other end says nothing")
            greeting: Greeting = end.recv()
            if greeting.protocol != PROTOCOL:
                raise NotAdmitted(f"a rank on {greeting.host} is of another release of diptych")
        except BaseException:
            end.close()
            raise
        return greeting, end


def join(host: str, port: int, key: bytes) -> Ends:
    """Join the group whose rank 0 listens at an address. Raises OSError, which NotAdmitted is."""
    name = os.urandom(16)
    ends: dict[str, Connection[Any, Any]] = {}
    for kind in KINDS:
        connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
        own = connection.getsockname()[0]
        ends[kind] = _open(connection, key, b"rank", b"rank-0")
        ends[kind].send(Greeting(kind, name, own, os.getpid()))
    return ends


def _is_whole(one: _Joining) -> bool:
    """Return whether a process has all its connections, and is there."""
    return len(one.ends) == len(KINDS) and not one.ends["life"].poll(0)


def _open(connection: socket.socket, key: bytes, own: bytes, other: bytes) -> Connection[Any, Any]:
    """Return a connection whose other end has proven that it has the key. Raises NotAdmitted, OSError."""
    until = time.monotonic() + HANDSHAKE_S
    try:
        connection.settimeout(HANDSHAKE_S)
        nonce = os.urandom(_NONCE_BYTES)
        connection.sendall(nonce)
        theirs = _receive(connection, _NONCE_BYTES, until)
        connection.sendall(_proof(key, own, nonce, theirs))
        proof = _receive(connection, _PROOF_BYTES, until)
        if not hmac.compare_digest(proof, _proof(key, other, theirs, nonce)):
            raise NotAdmitted("the other end has another secret (--rank-key-file)")
        _watch(connection)
    except BaseException:
        connection.close()
        raise
    return Connection(connection.detach())


def _watch(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host does not answer, and messages go at once."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(key: bytes, side: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + own + other, "sha256")


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    received = b""
    while len(received) < count:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("the other end does not prove the secret in time")
        connection.settimeout(left)
        if not (more := connection.recv(count - len(received))):
            raise NotAdmitted("the other end closed the connection: it has another secret (--rank-key-file)?")
        received += more
    return received
