"""A worker's side of the packed weights of its host.

Under a supervisor that is the holder. Workers that were started one by one find each other by a name that
only their user and the key decide: the first is the holder, for itself too, and when it dies one of the
others takes its place with the file that it maps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

from diptych.runtime.weight_store import protocol
from diptych.runtime.weight_store.holder import WeightHolder

_WAIT_S = 240.0
"""Longest wait for another worker that packs: a supervisor gives a worker 300 s to start."""
_ANSWER_S = 10.0
_RETRIES = 20
_PAUSE_S = 0.05
_log = logging.getLogger(__name__)


class HostWeights:
    """Files of packed weights of this host, by their key; see `WeightStore` in the engine."""

    def __init__(self, holder: str | None = None, *, wait_s: float = _WAIT_S) -> None:
        """Ask the holder at the abstract socket `holder`; None: the workers of this user among themselves."""
        self._holder = holder
        self._wait_s = wait_s
        self._packing: dict[str, socket.socket] = {}
        self._own: dict[str, WeightHolder] = {}
        self._closed = False

    def obtain(self, key: str) -> int | None:
        """Return the file of `key`, the caller's to close; None: the caller packs it. Raises OSError."""
        connection = self._join(key)
        try:
            connection.send(protocol.get_message(key))
            connection.settimeout(self._wait_s)
            answer, fds, _, _ = socket.recv_fds(
                connection, protocol.MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            connection.close()
            raise
        if answer == protocol.PACK:
            self._packing[key] = connection
            return None
        if answer != protocol.FILE or len(fds) != 1 or not protocol.is_sealed(fds[0]):
            connection.close()
            for fd in fds:
                os.close(fd)
            raise OSError("the holder of packed weights gave no whole file")
        self._keep(key, connection, fds[0])
        return fds[0]

    def publish(self, key: str, file: int) -> None:
        """Give all others the sealed file of `key`. Raises OSError."""
        connection = self._packing[key]
        connection.settimeout(_ANSWER_S)
        socket.send_fds(connection, [protocol.DONE], [file])
        if connection.recv(protocol.MESSAGE_BYTES) != protocol.KEPT:
            raise OSError("the holder of packed weights took no file")
        self._keep(key, self._packing.pop(key), file)

    def give_up(self, key: str) -> None:
        """Leave it to another process to pack the file of `key`."""
        connection = self._packing.pop(key, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Stop packing and holding files for others; for tests, as a process does that when it ends."""
        self._closed = True
        for connection in self._packing.values():
            connection.close()
        for holder in self._own.values():
            holder.close()
        self._packing.clear()
        self._own.clear()

    def _name(self, key: str) -> str:
        return self._holder or f"diptych-weights-{os.geteuid()}-{key}"

    def _join(self, key: str) -> socket.socket:
        """Return a connection to the holder, which may be this process. Raises OSError."""
        failure: OSError | None = None
        for _ in range(_RETRIES):
            try:
                return _connect(self._name(key))
            except ConnectionRefusedError as error:
                failure = error
                if self._holder is not None:
                    raise
            with contextlib.suppress(OSError):  # another worker was faster: it is asked
                self._own[key] = WeightHolder(self._name(key))
                continue
            time.sleep(_PAUSE_S)
        raise failure or OSError("no holder of packed weights")

    def _keep(self, key: str, connection: socket.socket, file: int) -> None:
        """Keep the lease while this process lives, and the file where a holder may have to be replaced."""
        kept = os.dup(file) if self._holder is None else None
        connection.settimeout(None)
        threading.Thread(
            target=self._watch, args=(key, connection, kept), name="weight-lease", daemon=True
        ).start()

    def _watch(self, key: str, connection: socket.socket, file: int | None) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection.recv(protocol.MESSAGE_BYTES)  # nothing comes but the holder's end
            connection.close()
            if file is None:
                return
            if self._closed:
                os.close(file)
                return
            time.sleep(_PAUSE_S)
            try:
                connection = self._join(key)
                socket.send_fds(connection, [protocol.offer_message(key)], [file])
                connection.recv(protocol.MESSAGE_BYTES)
            except OSError as error:
                _log.warning("packed weights are not offered to other workers any more: %s", error)
                os.close(file)
                return


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect("\0" + name)
        if not protocol.same_user(connection):
            raise OSError("the holder of packed weights is another user's")
        return connection
    except BaseException:
        connection.close()
        raise
