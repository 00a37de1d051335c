"""A server as a process group: started, parked while others are measured, and always ended.

A guard holds the read end of a pipe: when this program is gone, however it went, the guard kills the server's
group, parked or not.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.peers.servers import Server

_POLL_S = 0.1
_STOP_S = 15.0
_LOG_TAIL = 20
_GUARD = """
import os, signal, sys
sys.stdin.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


class StartFailed(Exception):
    """A server did not come up; the message has the end of its log."""


class RunningServer:
    """Use as a context manager; `start_s` is the time from its start until it answered."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.port, self._spare_port = _free_ports(2)
        self._log = folder / f"{server.name}.log"
        self._ready_file = folder / f"{server.name}.ready"
        self.start_s = 0.0

    def __enter__(self) -> Self:
        self._ready_file.unlink(missing_ok=True)
        command = self.server.command(self.port, self._spare_port, self._ready_file)
        began = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self.server.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-c", _GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._await_ready(began + self.server.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def http_port(self) -> int:
        """Port of HTTP, of a server whose command has one."""
        return self._spare_port

    @property
    def pid(self) -> int:
        return self._process.pid

    def park(self) -> None:
        """Takes it off the cores; its memory stays."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Politely, then not: afterwards no process of its group is left."""
        self._signal(signal.SIGCONT)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()  # nothing is left for it to kill; it ends
        self._guard.wait()

    def _await_ready(self, deadline: float) -> None:
        while not self._is_ready():
            if self._process.poll() is not None:
                raise StartFailed(f"{self.server.name}: status {self._process.returncode}\n{self._tail()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.server.name}: not ready in time\n{self._tail()}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        if self.server.family == "diptych":
            return self._ready_file.exists()
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _free_ports(count: int) -> list[int]:
    """Free at this moment, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
