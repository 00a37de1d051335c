"""Proof of death: a pidfd of the process that maps our pool, a kill through it, and the wait for its end.

A store to shared memory cannot be revoked and a closed stream proves nothing, so the end of the process is
the only fence. A pidfd names the process itself: a pid that the kernel has given away again cannot be hit.
It becomes readable when the last thread has left the address space, after which no store can come.
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
    """A process that may write our memory until it is dead."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of_peer(cls, connection: socket.socket) -> WriterProcess:
        """The process at the other end of a Unix socket.

        Before Linux 6.5 the pidfd is opened by number; the caller must then hear from the peer once more
        before it relies on it, which proves that the number was still the peer's. Raises OSError.
        """
        pid = peer_credentials(connection).pid
        try:
            pidfd = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), "little")
        except OSError:
            pidfd = os.pidfd_open(pid)
        os.set_inheritable(pidfd, False)
        return cls(pid, pidfd)

    def kill(self) -> None:
        """SIGKILL. Death is reported by `watch`, not by this call. Refuses to end the calling process."""
        if self.pid == os.getpid():
            raise ValueError("a process cannot fence itself and live to use the proof")
        if self._pidfd is None:
            return
        # Dead and reaped already: the pidfd is readable then, and `watch` says so.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once on the running loop when the process is dead."""
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
