"""A host of images on this machine, for tests of what fetches them, and addresses that must lead nowhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.vision_models import picture, png

FILE = png(picture(1, 20, 20))


class ImageHost:
    """Server on loopback that counts connections; its paths are the behaviours that it has."""

    def __init__(self) -> None:
        self.connections = 0
        self.heads: list[dict[str, str]] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                host.connections += 1
                super().setup()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

            def do_GET(self) -> None:
                host.heads.append({name.lower(): value for name, value in self.headers.items()})
                kind, _, rest = self.path.strip("/").partition("/")
                getattr(self, f"_{kind.partition('?')[0]}", self._missing)(rest)

            def _whole(self, data: bytes = FILE, **headers: str) -> None:
                self.send_response(200)
                for name, value in {"Content_Length": str(len(data)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def _image(self, _: str) -> None:
                self._whole()

            def _long(self, _: str) -> None:
                self._whole(bytes(300_000))

            def _zipped(self, _: str) -> None:
                self._whole(Content_Encoding="gzip")

            def _cut(self, _: str) -> None:
                self._whole(FILE[:9], Content_Length=str(len(FILE)))

            def _text(self, _: str) -> None:
                self._whole(b"no image")

            def _endless(self, _: str) -> None:
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    for _ in range(1000):
                        self.wfile.write(bytes(65536))

            def _drip(self, _: str) -> None:
                with contextlib.suppress(OSError):
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    while not host.closing.wait(0.02):
                        self.wfile.write(b"X: y\r\n")

            def _to(self, location: str) -> None:
                self.send_response(302)
                self.send_header("Location", location.replace("%PORT", str(host.port)))
                self.end_headers()

            def _again(self, _: str) -> None:
                self._to("/again")

            def _missing(self, _: str) -> None:
                self.send_error(404)

        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def settled(self) -> int:
        """Return the connections so far, those that just came included."""
        time.sleep(0.05)
        return self.connections


@contextlib.contextmanager
def image_host() -> Iterator[ImageHost]:
    host = ImageHost()
    try:
        yield host
    finally:
        host.close()


def private_urls(port: int, count: int) -> Iterator[str]:
    """Yield addresses of private hosts, most of them of this one's `port`, in many spellings."""
    local = ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]")
    local += ("2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1", "127.1", "0", "0.0.0.0")
    local += ("127.0.0.1.", "localhost.", "LOCALHOST", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "①②⑦.0.0.1")
    hosts = [f"{one}:{port}" for one in local]
    hosts += [
        f"user:pass@localhost:{port}",
        f"example.org@localhost:{port}",
        f"example.org\\@localhost:{port}",
    ]
    hosts += [
        f"example.org:{port}#@localhost:{port}",
        f"example.org%00.localhost:{port}",
        f"rebound.test:{port}",
    ]
    hosts += ["169.254.169.254/latest/meta-data", "10.0.0.1", "192.168.0.1", "172.16.0.1", "[fe80::1%25lo]"]
    hosts += ["metadata.test", "mixed.test", "[fd00:ec2::254]", "100.100.100.200", "168.63.129.16"]
    schemes = ("http://", "https://", "HTTP://", "http:", "//", "ftp://", "gopher://", "file:///", " http://")
    number = 0
    while True:
        for scheme in schemes:
            for host in hosts:
                if number == count:
                    return
                yield f"{scheme}{host}/image/{number}.png"
                number += 1
