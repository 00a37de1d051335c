"""The proxy does what the tests that use it rely on."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy import Proxy, running_proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with running_proxy(server.server_address[1]) as running:
            yield running
        server.shutdown()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def test_it_forwards_and_delays_each_way(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"one")
        assert connection.recv(10) == b"one"
        proxy.delay_s = 0.1
        started = time.monotonic()
        connection.sendall(b"two")
        assert connection.recv(10) == b"two"
        assert time.monotonic() - started >= 0.2
    assert proxy.forwarded == 12


def test_frozen_nothing_comes_and_nothing_is_lost(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        proxy.freeze()
        connection.sendall(b"late")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        proxy.thaw()
        connection.settimeout(5)
        assert connection.recv(10) == b"late"


def test_cut_connections_are_reset_and_refused_ones_never_open(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(10)
    proxy.refuse()
    # The reset may come before the connection is made, or after.
    with pytest.raises(ConnectionResetError), connected(proxy) as connection:
        connection.recv(10)
    proxy.accept()
    with connected(proxy) as connection:
        connection.sendall(b"y")
        assert connection.recv(10) == b"y"
