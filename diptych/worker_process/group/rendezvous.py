"""Meeting of a group's ranks on several hosts: four TCP connections each, on which both ends prove a secret.

    life      nothing is ever sent; its end is the other process' end, or that of the network between them
    control   orders about memories, as to ranks of this host (orders.py)
    plans     steps, and writes to blocks between them, in order; the answers to steps
    blocks    shares of blocks that rank 0 reads

    nonces    32 bytes each way
    proofs    HMAC-SHA256 of the secret over the side's name and both nonces, each way
    greeting  the rank's `Greeting`, pickled: nothing is unpickled before the other end has proven the secret

What follows is neither encrypted nor signed, and neither is what ranks exchange over Gloo: the network
between the hosts of a group must be one that is trusted.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from diptych.engine.parallel.communicator import GroupBroken

KINDS = ("life", "control", "plans", "blocks")
PROTOCOL = 1
"""Number of the messages between the processes of a group; another one with every change of them."""
JOIN_S = 300.0
"""Seconds that rank 0 waits for the ranks of other hosts."""
HANDSHAKE_S = 5.0
"""Seconds until the other end must have proven the secret, and as many until its greeting has begun."""
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
        joining: dict[bytes, _Joining] = {}
        try:
            while len(joined := [one for one in joining.values() if _is_whole(one)]) < count:
                left = until - time.monotonic()
                if left <= 0 or not self._accept_one(left, joining):
                    raise GroupBroken(
                        f"{len(joined)} of {count} ranks of other hosts joined at {self.host}:{self.port} "
                        f"within {timeout_s:.0f} s"
                    )
        finally:
            self._listener.close()
        return [Joined(one.greeting.host, one.greeting.pid, one.ends) for one in joined[:count]]

    def _accept_one(self, timeout_s: float, joining: dict[bytes, _Joining]) -> bool:
        """Take a connection, if one comes in time."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return False
        try:
            end = _open(connection, self._key, b"rank-0", b"rank")
            if not end.poll(HANDSHAKE_S):
                raise NotAdmitted("the other end says nothing")
            greeting: Greeting = end.recv()
        except (OSError, EOFError) as error:
            _log.warning("a connection to the rendezvous is refused: %s", error)
            return True
        if greeting.protocol != PROTOCOL:
            _log.error("a rank on %s is of another release of diptych", greeting.host)
            end.close()
            return True
        joining.setdefault(greeting.name, _Joining(greeting)).ends[greeting.kind] = end
        return True


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
