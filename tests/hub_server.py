"""Hub of models: a real HTTP server that speaks the Hugging Face Hub's endpoints, for one repository."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REPO, COMMIT = "org/small", "c" * 40
LARGE = ".safetensors"


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Hub(ThreadingHTTPServer):
    """Hub with one repository. It does not give the files in ``fails``, and those in ``damages`` wrong."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.gets: Counter[str] = Counter()
        self.fails: set[str] = set()
        self.damages: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        if path == f"/api/models/{REPO}/revision/main":
            self._json({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            self._json([_entry(name, content) for name, content in self.server.files.items()])
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self._file(path.split(f"{COMMIT}/", 1)[1])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        content = self.server.files[name]
        if self.command == "GET":
            self.server.gets[name] += 1
            if name in self.server.fails:
                self._send(HTTPStatus.FORBIDDEN, b"", {})
                return
        sent = b"\0" * len(content) if name in self.server.damages else content
        etag = hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else git_hash(content)
        self._send(HTTPStatus.OK, sent, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    if name.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def running_hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve files by their names."""
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
