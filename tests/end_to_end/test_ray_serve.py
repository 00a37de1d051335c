"""A system as an application of Ray Serve: answers through its proxy, and is replaced when it ends.

Ray is no dependency of the tests: they are skipped where it, with Serve, is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_ray import FLAGS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "starlette", "uvicorn")),
        reason="Ray Serve is not installed",
    ),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.timeout(900),
]
TOKENS = 60
BACK_S = 300.0


def answer(url: str, *, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Return the events of one streamed completion. Raises OSError, which HTTPError is."""
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"stream": True, "ignore_eos": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line.decode().removeprefix("data: ").strip() for line in stream if line.startswith(b"data:")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a tiny model on a cluster of one node. Yields the URL of Serve's proxy, and the model."""
    import ray
    from ray import serve

    from diptych.cli.ray_cluster.serve_application import Arguments, application

    model = tiny_model.write(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": _environment()})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        flags = " ".join(("--model", str(model), *FLAGS, "--grpc-port", "0"))
        serve.run(application(Arguments(flags=flags)), name="diptych", route_prefix="/llm")
        yield f"http://127.0.0.1:{port}/llm", model
    finally:
        serve.shutdown()
        ray.shutdown()


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}


def commands() -> list[int]:
    """Return the processes that run `diptych up --ray` below a replica."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--ray-targets" in words and b"up" in words:
                found.append(int(folder.name))
    return found


def test_a_system_serves_through_ray_serve_and_comes_back(served: tuple[str, Path]) -> None:
    url, model = served
    with running_stack("--model", str(model), *FLAGS) as stack:
        expected = text(answer(f"http://127.0.0.1:{stack.account['gateway']['http_port']}"))
    events = answer(url)
    assert text(events) == expected
    assert len(events) > TOKENS // 2, "a stream comes in pieces"
    with pytest.raises(urllib.error.HTTPError) as refused:
        answer(url, tokens=-1)
    assert refused.value.code == 400
    assert "max_tokens" in refused.value.read().decode()
    [before] = commands()
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            assert text(answer(url)) == expected
            break
        except OSError:
            assert time.monotonic() < deadline, "no other replica serves"
            time.sleep(1)
    assert before not in commands()
