"""Models of the Hub, from a real HTTP server that speaks its endpoints."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from diptych.runtime.hub import HubModel

REPO, COMMIT = "org/small", "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4096,
    "tokenizer.json": b"{}",
    "onnx/model.json": b"of no use here",
    "pytorch_model.bin": b"neither",
}
LARGE = "model.safetensors"
PROGRAM = """
import sys
from diptych.runtime.hub import HubError, HubModel, cached_model, download_model
model = HubModel.parse(sys.argv[2])
try:
    print(download_model(model) if sys.argv[1] == "download" else cached_model(model))
except HubError as error:
    print("refused:", error)
"""


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Hub(ThreadingHTTPServer):
    """Hub with one repository. It does not give the files in ``fails``, and those in ``damages`` wrong."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
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
            self._json([_entry(name, content) for name, content in FILES.items()])
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self._file(path.split(f"{COMMIT}/", 1)[1])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        content = FILES[name]
        if self.command == "GET":
            self.server.gets[name] += 1
            if name in self.server.fails:
                self._send(HTTPStatus.FORBIDDEN, b"", {})
                return
        sent = b"\0" * len(content) if name in self.server.damages else content
        etag = hashlib.sha256(content).hexdigest() if name == LARGE else git_hash(content)
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
    if name == LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(url: str, cache: Path, what: str, model: str = REPO) -> str:
    """Return what the program prints, in a process that reads the Hub's variables."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", PROGRAM, what, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_model_is_downloaded_goes_on_after_a_failure_and_is_found_without_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    hub.fails = {LARGE}
    assert run(hub.url, tmp_path, "download").startswith(
        f"refused: {REPO} cannot be downloaded from {hub.url}"
    )
    assert run(hub.url, tmp_path, "cached") == "None"
    hub.fails = set()
    folder = Path(run(hub.url, tmp_path, "download"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", LARGE, "tokenizer.json")
    }
    assert hub.gets["config.json"] == 1, "it was there already"
    asked = hub.gets.total()
    assert run("http://127.0.0.1:1", tmp_path, "download") == str(folder)
    assert hub.gets.total() == asked


def test_file_that_came_damaged_is_refused_and_comes_anew(hub: Hub, tmp_path: Path) -> None:
    hub.damages = {LARGE}
    assert run(hub.url, tmp_path, "download").startswith(f"refused: {LARGE} of {REPO} came damaged")
    hub.damages = set()
    assert (Path(run(hub.url, tmp_path, "download")) / LARGE).read_bytes() == FILES[LARGE]


@pytest.mark.parametrize(
    ("model", "parsed"),
    [
        ("org/name", HubModel("org/name", None, "")),
        ("org/name@v1.0", HubModel("org/name", "v1.0", "")),
        ("org/name/sub/x-Q4_0.gguf", HubModel("org/name", None, "sub/x-Q4_0.gguf")),
        ("name", None),
        ("bundled", None),
        ("org/x.gguf", None),
        ("/org/name", None),
        ("here/name", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(
    model: str, parsed: HubModel | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubModel.parse(model) == parsed
