"""Download of a remote image, on a thread: resolve, judge, connect, read within limits.

The name is resolved once. All its addresses must be public, and the connection goes to one of them, so that a
name that leads elsewhere the next time (DNS rebinding) leads nowhere. The thread may be told to stop at any
time: its socket is shut down under it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeVar

from gateway.images.memory import ByteBudget
from gateway.images.url_rules import RefusedUrl, Target, UrlRules, is_public

MOST_REDIRECTS: Final = 3
MOST_ADDRESSES: Final = 4
"""Addresses of a host that are tried."""
CONNECT_S: Final = 2.0
"""Time for one of them."""
_CHUNK: Final = 1 << 16
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_HEADERS: Final = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
    "Connection": "close",
    "User-Agent": "diptych",
}
Resolve = Callable[[str, int], list[str]]
Judge = Callable[[IPv4Address | IPv6Address], bool]
Socket = TypeVar("Socket", bound=socket.socket)


def resolve(host: str, port: int) -> list[str]:
    """Return a host's addresses. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class Download:
    """Download of a URL: `run` on a thread, `stop` on any other."""

    def __init__(
        self,
        rules: UrlRules,
        target: Target,
        budget: ByteBudget,
        until: float,
        resolve: Resolve = resolve,
        judge: Judge = is_public,
    ) -> None:
        """Do nothing yet.

        Args:
            until: time by `time.monotonic` at which it is given up.
            resolve: returns a host's addresses.
            judge: returns whether an address may be connected to.
        """
        self._rules, self._target, self._budget, self._until = rules, target, budget, until
        self._resolve, self._judge = resolve, judge
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = False

    def run(self) -> bytes:
        """Return the file. Raises RefusedUrl, ImageMemory, and TimeoutError at its end of time."""
        target = self._target
        try:
            for _ in range(MOST_REDIRECTS + 1):
                found = self._ask(target)
                if isinstance(found, bytes):
                    return found
                target = self._rules.redirected(target, found)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError):
            raise RefusedUrl("cannot be fetched") from None
        finally:
            self._close()
        raise RefusedUrl(f"is redirected more than {MOST_REDIRECTS} times")

    def stop(self) -> None:
        """Let `run` end soon. It may be looking up a name, which ends by the resolver's own limits."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, which is not told

    def _ask(self, target: Target) -> bytes | str:
        """Return the file at a URL, or where that says it is."""
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = self._connect(target)
        connection.request("GET", target.path, headers={"Host": target.authority, **_HEADERS})
        with connection.getresponse() as response:
            if response.status in _REDIRECTS and (location := response.getheader("Location")):
                return location
            if response.status != http.client.OK:
                raise RefusedUrl(f"cannot be fetched: its host answers with status {response.status}")
            if response.getheader("Content-Encoding", "identity").lower() != "identity":
                raise RefusedUrl("cannot be fetched: its host compresses it, which was not asked for")
            return self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.length is not None and not self._budget.take(response.length):
            raise RefusedUrl("has more bytes than the images of a request may have together")
        data = bytearray()
        while chunk := response.read1(_CHUNK):
            if response.length is None and not self._budget.take(len(chunk)):
                raise RefusedUrl("has more bytes than the images of a request may have together")
            data += chunk
            self._time_left()
        if response.length:
            raise RefusedUrl("cannot be fetched: it is cut off")
        return bytes(data)

    def _connect(self, target: Target) -> socket.socket:
        """Return a connection to one of a host's addresses, all of which are public."""
        self._close()
        if self._stopped:  # while it waited for a thread: its caller has left
            raise OSError("stopped")
        addresses = [ip_address(one) for one in self._resolve(target.host, target.port)]
        if not addresses or not all(map(self._judge, addresses)):
            raise RefusedUrl("names a host without a public address")
        for address in addresses[:MOST_ADDRESSES]:
            with contextlib.suppress(OSError):
                return self._open(str(address), target)
        raise OSError("no address answers")

    def _open(self, address: str, target: Target) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = self._keep(socket.socket(family, socket.SOCK_STREAM))
        made.settimeout(min(self._time_left(), CONNECT_S))
        made.connect((address, target.port))
        made.settimeout(self._time_left())
        if target.scheme == "http":
            return made
        secured = self._keep(_secured(made, target.host))
        secured.do_handshake()
        return secured

    def _keep(self, made: Socket) -> Socket:
        with self._lock:
            if self._socket is not None:
                self._socket.close()  # it did not connect, or is below this one's TLS
            self._socket = made
            if self._stopped:
                raise OSError("stopped")
        return made

    def _close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _time_left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _secured(made: socket.socket, host: str) -> ssl.SSLSocket:
    return _tls().wrap_socket(made, server_hostname=host, do_handshake_on_connect=False)


@cache
def _tls() -> ssl.SSLContext:
    """Return the system's authorities; reading them takes some 20 ms."""
    return ssl.create_default_context()
