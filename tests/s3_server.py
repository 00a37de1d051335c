"""Server of S3's protocol for tests: one bucket in memory, and signatures checked by code of its own."""

from __future__ import annotations

import hashlib
import hmac
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, REGION, ACCESS, SECRET = "blocks", "eu-test-1", "AKEXAMPLE", "s3cret/with+signs"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}


class S3Server(ThreadingHTTPServer):
    """Use as a context manager. `page` bounds the names of an answer, `status` makes all requests fail.

    Args:
        tls: context of a server over TLS.
    """

    daemon_threads = True

    request_queue_size = 64

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.objects: dict[str, bytes] = {}
        self.page = 1000
        self.status = 0
        self.requests: list[str] = []
        self.close_after = False
        """Close each connection after its answer, without saying so."""
        self.together: threading.Barrier | None = None
        """Reads of objects that are answered together: each waits until so many are there, or fails."""
        self.cut = 0
        """Bytes that each answer lacks at its end, after which its connection is closed."""
        self.running = threading.Event()
        self.running.set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Return what `--kv-tier` takes."""
        return (
            f"s3://{BUCKET}/some/where?endpoint={self._scheme}://127.0.0.1:{self.server_port}&region={REGION}"
        )

    def freeze(self) -> None:
        """Answer nothing until `thaw`."""
        self.running.clear()

    def thaw(self) -> None:
        """Answer again."""
        self.running.set()

    def close(self) -> None:
        self.thaw()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer, of a head and a body, waits 40 ms for an acknowledgement
    server: S3Server

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests.append(f"{method} {self.path}")
        self.server.running.wait(10)
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).removeprefix("/").partition("/")
        if method == "GET" and "?" not in self.path and not self._meets_others():
            self._send(503, b"<Error><Code>Alone</Code></Error>")
        elif self.server.status:
            self._send(self.server.status, b"<Error><Code>SlowDown</Code></Error>")
        elif not self._signed(method, body):
            self._send(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        elif bucket != BUCKET:
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif method == "PUT":
            self.server.objects[name] = body
            self._send(200)
        elif method == "DELETE":
            self.server.objects.pop(name, None)
            self._send(204)
        elif not name:
            self._send(200, self._list(dict(parse_qsl(parts.query))))
        elif name in self.server.objects:
            self._send(200, self.server.objects[name])
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _meets_others(self) -> bool:
        if self.server.together is None:
            return True
        try:
            self.server.together.wait(10)
        except threading.BrokenBarrierError:
            return False
        return True

    def _list(self, query: dict[str, str]) -> bytes:
        names = sorted(name for name in self.server.objects if name.startswith(query["prefix"]))
        begin = int(query.get("continuation-token", "at 0")[3:])
        end = begin + min(int(query["max-keys"]), self.server.page)
        more = end < len(names)
        token = f"<NextContinuationToken>at {end}</NextContinuationToken>" if more else ""
        contents = "".join(
            f"<Contents><Key>{escape(one)}</Key><Size>1</Size></Contents>" for one in names[begin:end]
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        ).encode()

    def _signed(self, method: str, body: bytes) -> bool:
        scheme, _, rest = self.headers.get("authorization", "").partition(" ")
        fields = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
        access, day, region, *_ = fields.get("Credential", "///").split("/")
        digest = self.headers.get("x-amz-content-sha256", "")
        if (scheme, access, region) != ("AWS4-HMAC-SHA256", ACCESS, REGION):
            return False
        if digest != hashlib.sha256(body).hexdigest():
            return False
        target, _, query = self.path.partition("?")
        names = fields["SignedHeaders"].split(";")
        head = [f"{name}:{self.headers[name]}" for name in names]
        wanted = [method, target, "&".join(sorted(query.split("&"))), *head, "", ";".join(names), digest]
        scope = f"{day}/{region}/s3/aws4_request"
        hashed = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{hashed}"
        key = ("AWS4" + SECRET).encode()
        for part in (*scope.split("/"), text):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.compare_digest(key.hex(), fields["Signature"])

    def _send(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - self.server.cut])
        self.close_connection = self.server.close_after or bool(self.server.cut)
