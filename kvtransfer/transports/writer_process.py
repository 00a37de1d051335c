"""Fence of a writer that maps the pool: a pidfd of the process, a kill through it, the wait for its death.

    watched   → kill() sends SIGKILL; the pidfd becomes readable when the process is dead
    dead      → `on_death` is called once; from here on no store can come
    closed    → the process is forgotten; its death is not reported

A store to shared memory cannot be revoked and a closed stream proves nothing, so the end of the process is
the only fence. A pidfd names the process itself: a pid that the kernel has given away again cannot be hit. It
becomes readable when the last thread has left the address space, after which no store can come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

from diptych.runtime.peer_credentials import peer_credentials

_SO_PEERPIDFD = 77  # Linux 6.5; not yet in Python's socket module


class WriterProcess:
    """Process that may write to the memory of this one until it is dead."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of_peer(cls, connection: socket.socket) -> WriterProcess:
        """Return the process at the other end of a Unix socket.

        Before Linux 6.5 the pidfd is opened by number. The caller must then receive one more message of the
        peer before it relies on it, which proves that the number was still the peer's. Raises OSError.
        """
        pid = peer_credentials(connection).pid
        try:
            pidfd = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), "little")
        except OSError:
            pidfd = os.pidfd_open(pid)
        os.set_inheritable(pidfd, False)
        return cls(pid, pidfd)

    def kill(self) -> None:
        """Send SIGKILL; `watch` reports the death. Raises ValueError for the calling process."""
        if self.pid == os.getpid():
            raise ValueError("a process cannot fence itself and live to use the proof")
        if self._pidfd is None:
            return
        # Dead and reaped already: the pidfd is readable then, and `watch` reports it.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once on the running loop when the process is dead. ValueError after `close`."""
        if self._pidfd is None:
            raise ValueError("the process is not watched any more")
        self._loop = asyncio.get_running_loop()

        def dead() -> None:
            self.close()
            on_death()

        self._loop.add_reader(self._pidfd, dead)

    def close(self) -> None:
        """Forget the process. Its death will not be reported."""
        if self._pidfd is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
