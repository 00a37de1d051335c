"""Shares of blocks that other workers' ranks send to this one, kept until rank 0 says what becomes of them.

    token    of a session, made by rank 0's secret: nothing else is read before it was shown
    frame*   each is kept, hashed and told to rank 0, which places it among the plans of steps or drops it

A connection reads no more while it keeps `KEPT_BYTES`. Rank 0 answers every share, so that none stays.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from diptych.runtime.bind_address import join_host_port
from kvtransfer.transports.data_listener import REGISTRATION_S
from kvtransfer.transports.rank_data import (
    ACCEPTED,
    HEADER,
    SESSION_TOKEN_BYTES,
    ArrivedShare,
    RankEvent,
    SessionBroke,
    read_session_token,
    share_hash,
)

KEPT_BYTES = 64 << 20
"""Most bytes of shares that are kept of one connection, or one share."""
MAX_STRANGERS = 64
"""Connections at once that have not shown a token."""
ENDED_SESSIONS = 1024
"""Last sessions that ended whose late senders are turned away."""
ACCEPT_AGAIN_S = 0.1
_log = logging.getLogger(__name__)


class _Kept:
    """Shares of one connection that rank 0 has not answered for yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.bytes = 0


class ShareArrivals:
    """Listener for shares of the blocks of one memory. Any thread may call.

    Args:
        host: address of this rank.
        secret: maker of the tokens.
        largest: bytes of this rank's whole share of a block.
        tell: takes what rank 0 is to know.
    """

    def __init__(self, host: str, secret: bytes, largest: int, tell: Callable[[RankEvent], None]) -> None:
        """Listen on a free port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        port = self._listener.getsockname()[1]
        self.endpoint = join_host_port(host, port)
        self._secret, self._largest, self._tell = secret, largest, tell
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._changed = threading.Condition()
        self._sessions: dict[int, list[socket.socket]] = {}
        self._ended: deque[int] = deque(maxlen=ENDED_SESSIONS)
        self._staged: dict[int, tuple[_Kept, bytearray]] = {}
        self._next = 0
        threading.Thread(target=self._accept, name="shares", daemon=True).start()

    def take(self, staged: int) -> bytearray:
        """Return a share that was kept, and keep it no more. Raises KeyError."""
        with self._changed:
            kept, payload = self._staged.pop(staged)
            kept.bytes -= len(payload)
            self._changed.notify_all()
        return payload

    def end_session(self, session: int) -> None:
        """Close the connections of a session; what came by them stays until rank 0 has answered."""
        with self._changed:
            self._ended.append(session)
            for connection in self._sessions.pop(session, []):
                _shut(connection)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # a sender that is gone again, or too many open files
                _log.warning("a data connection was not accepted: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="share", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            admitted = self._admit(connection)
            if admitted is None:
                _log.warning("a data connection showed no token of a session")
                return
            session, source = admitted
            try:
                self._read_shares(connection, session, source)
            except (OSError, EOFError, ValueError) as error:
                _log.info("a data connection ended: %s", error)
            self._forget(session, connection)
            self._tell(SessionBroke(session))

    def _forget(self, session: int, connection: socket.socket) -> None:
        """Keep a connection that ended no longer."""
        with self._changed:
            left = [one for one in self._sessions.pop(session, []) if one is not connection]
            if left:
                self._sessions[session] = left

    def _admit(self, connection: socket.socket) -> tuple[int, int] | None:
        """Return session and sender of a connection, which is kept for the end of that session."""
        try:
            connection.settimeout(REGISTRATION_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token = memoryview(bytearray(SESSION_TOKEN_BYTES))
            receive_into(connection, token)
            admitted = read_session_token(self._secret, bytes(token))
            if admitted is None:
                return None
            connection.settimeout(None)
            with self._changed:
                if admitted[0] in self._ended:
                    return None  # it registers late
                self._sessions.setdefault(admitted[0], []).append(connection)
            connection.sendall(ACCEPTED)
            return admitted
        except (OSError, EOFError):
            return None
        finally:
            self._strangers.release()

    def _read_shares(self, connection: socket.socket, session: int, source: int) -> None:
        """Keep and tell shares until the connection ends. Raises OSError, EOFError, ValueError."""
        kept, header = _Kept(connection), memoryview(bytearray(HEADER.size))
        while True:
            receive_into(connection, header)
            slot, generation, index, length, digest = HEADER.unpack(header)
            if not 0 < length <= self._largest:
                raise ValueError(f"a share of {length} bytes, where {self._largest} are the most")
            self._await_room(kept, length, session)
            payload = bytearray(length)
            receive_into(connection, memoryview(payload))
            with self._changed:
                staged, self._next = self._next, self._next + 1
                self._staged[staged] = (kept, payload)
                kept.bytes += length
            hashed = share_hash(payload)
            self._tell(ArrivedShare(session, source, slot, generation, index, digest, hashed, length, staged))

    def _await_room(self, kept: _Kept, length: int, session: int) -> None:
        """Wait until a share of that length may be kept. Raises EOFError once the session ended."""
        with self._changed:
            while kept.bytes and kept.bytes + length > KEPT_BYTES:
                if kept.connection not in self._sessions.get(session, []):
                    raise EOFError("its session ended")
                self._changed.wait()


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer. Raises OSError, EOFError at the end of the connection."""
    filled = 0
    while filled < buffer.nbytes:
        if not (count := connection.recv_into(buffer[filled:])):
            raise EOFError("the other end closed it")
        filled += count


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it ended by itself
        connection.shutdown(socket.SHUT_RDWR)
