"""Holder of a host's packed weights: it keeps the sealed files and says which worker packs.

The life of a key's file:

    none -get-> PACKING by one worker, others wait -done, sealed-> HELD -last lease ends-> LINGERING
        PACKING -that worker dies-> PACKING by the next that waits, or forgotten
        LINGERING -get-> HELD;  -`linger_s`-> forgotten

A file that is half written is known to its packer alone: it has no name, and goes with the process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.runtime.weight_store import protocol

LINGER_S = 120.0
"""A worker that died is started again within ten seconds, and one that follows another takes its time to
load."""


@dataclass(eq=False)
class _File:
    """State of one key's file, and the connections that it concerns."""

    fd: int | None = None
    packer: socket.socket | None = None
    waiting: list[socket.socket] = field(default_factory=list)
    leases: set[socket.socket] = field(default_factory=set)
    unused_since: float | None = None


class WeightHolder:
    """Server on an abstract Unix socket, in a thread of its own."""

    def __init__(self, name: str, linger_s: float = LINGER_S) -> None:
        """Listen under `name`. Raises OSError where that is taken."""
        self.name = name
        self._linger_s = linger_s
        self._files: dict[str, _File] = {}
        self._key_of: dict[socket.socket, str] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind("\0" + name)
            self._listener.listen(64)
        except OSError:
            self._listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="weight-holder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and forget all files; who maps one keeps it."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._release)
            while True:
                for key, _ in self._selector.select(self._next_end()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj)
                    else:
                        return
                self._forget_unused()

    def _release(self) -> None:
        for connection in list(self._key_of):
            connection.close()
        for file in self._files.values():
            if file.fd is not None:
                os.close(file.fd)
        self._listener.close()
        self._selector.close()
        os.close(self._wake_read)

    def _next_end(self) -> float | None:
        """Return the seconds until a file may be forgotten; None while all are used."""
        ends = [f.unused_since + self._linger_s for f in self._files.values() if f.unused_since is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _forget_unused(self) -> None:
        now = time.monotonic()
        for key, file in list(self._files.items()):
            if file.unused_since is not None and file.unused_since + self._linger_s <= now:
                if file.fd is not None:
                    os.close(file.fd)
                del self._files[key]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not protocol.same_user(connection):
                connection.close()
                return
            connection.setblocking(False)
            self._key_of[connection] = ""
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(
                connection, protocol.MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                self._closed(connection)
                return
            if (key := protocol.asked_key(message)) is not None:
                self._asked(connection, key)
            elif message == protocol.DONE or (key := protocol.offered_key(message)) is not None:
                self._given(connection, key or self._key_of[connection], fds, packed=key is None)
            else:
                self._closed(connection)
        except BlockingIOError:
            return
        except OSError:
            self._closed(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _asked(self, connection: socket.socket, key: str) -> None:
        if self._key_of[connection]:
            return
        self._key_of[connection] = key
        file = self._files.setdefault(key, _File())
        if file.fd is not None:
            self._lend(file, connection)
        elif file.packer is None:
            file.packer = connection
            connection.send(protocol.PACK)
        else:
            file.waiting.append(connection)

    def _given(self, connection: socket.socket, key: str, fds: Sequence[int], *, packed: bool) -> None:
        """Take a file that a worker has packed, or has from a holder that died."""
        self._key_of[connection] = key
        file = self._files.setdefault(key, _File()) if key else _File()
        mine = file.packer is connection if packed else True
        if not key or not mine or len(fds) != 1 or not protocol.is_sealed(fds[0]):
            connection.send(protocol.REFUSED)
            return
        if packed:
            file.packer = None
        if file.fd is None:
            file.fd = os.dup(fds[0])
        file.leases.add(connection)
        file.unused_since = None
        connection.send(protocol.KEPT)
        waiting, file.waiting = file.waiting, []
        for other in waiting:
            with contextlib.suppress(OSError):  # it died as it waited: seen when its connection is read
                self._lend(file, other)

    def _lend(self, file: _File, connection: socket.socket) -> None:
        assert file.fd is not None
        file.leases.add(connection)
        file.unused_since = None
        socket.send_fds(connection, [protocol.FILE], [file.fd])

    def _closed(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        key = self._key_of.pop(connection)
        connection.close()
        file = self._files.get(key)
        if file is None:
            return
        file.leases.discard(connection)
        if connection in file.waiting:
            file.waiting.remove(connection)
        if file.packer is connection:
            file.packer = None
            self._choose_packer(file)
        if file.packer is None and not file.leases and file.unused_since is None:
            file.unused_since = time.monotonic() if file.fd is not None else time.monotonic() - self._linger_s

    def _choose_packer(self, file: _File) -> None:
        while file.waiting and file.packer is None:
            chosen = file.waiting.pop(0)
            with contextlib.suppress(OSError):  # it died as it waited: seen when its connection is read
                chosen.send(protocol.PACK)
                file.packer = chosen
