"""`diptych up --ray` on three nodes in network namespaces, one of which and Redis end under load."""

from __future__ import annotations

import ctypes
import http.client
import importlib.util
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.valkey import valkey_binary
from tests.end_to_end import tiny_model
from tests.end_to_end.ray_nodes import (
    ENVIRONMENT,
    HEAD_PORT,
    NetworkNode,
    may_make_namespaces,
    network_nodes,
    start_ray,
)
from tests.end_to_end.stack import Stack, running_stack

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(not may_make_namespaces(), reason="no network namespaces can be made here"),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.timeout(900),
]
STREAMS = 6
TOKENS = 400
BACK_S = 300.0
REDIS = ("10.213.7.1", 6397)
CLONE_NEWNET = 0x40000000
FLAGS = ("--dtype", "fp32", "--model-name", "tiny", "--set", "gateway.worker-wait-timeout=240")
WORKERS = (
    "--prefill-workers",
    "2",
    "--decode-workers",
    "2",
    "--prefill-threads",
    "1",
    "--decode-threads",
    "1",
)


def start_redis() -> subprocess.Popen[bytes]:
    host, port = REDIS
    command = [
        str(valkey_binary()),
        "--bind",
        host,
        "--port",
        str(port),
        "--save",
        "",
        "--protected-mode",
        "no",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def enter(node: NetworkNode | None) -> None:
    """Let this thread make its connections in the namespace of a node."""
    if node is None:
        return
    with Path(f"/run/netns/{node.name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def stream(stack: Stack, number: int, node: NetworkNode | None, begun: Callable[[], None]) -> str:
    """Return the text of one stream; `begun` is called once some of it has come."""
    enter(node)
    body = {"model": "tiny", "prompt": tiny_model.prompt(number, 20), "max_tokens": TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", stack.account["gateway"]["http_port"], timeout=400)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    text, pieces, ended = "", 0, False
    for line in answer:
        if line.strip() == b"data: [DONE]":
            ended = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            pieces += 1
            if pieces == 4:
                begun()
    connection.close()
    assert ended, "the stream broke off"
    return text


def texts(
    stack: Stack, node: NetworkNode | None = None, disturb: Callable[[], None] | None = None
) -> list[str]:
    """Return the texts of streams that run at once; `disturb` is called when all have begun."""
    barrier = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        found: list[Future[str]] = [
            pool.submit(stream, stack, number, node, lambda: void(barrier.wait(300)))
            for number in range(STREAMS)
        ]
        barrier.wait(300)
        if disturb is not None:
            disturb()
        return [one.result() for one in found]


def void(_: object) -> None:
    """Take a value and return none."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """Return the texts of the same streams from `diptych up` without Ray."""
    with running_stack("--model", str(model), *FLAGS) as stack:
        return texts(stack)


@pytest.fixture
def nodes() -> Iterator[list[NetworkNode]]:
    """Start a head without CPUs, and two nodes with room for both pairs each."""
    with tempfile.TemporaryDirectory(prefix="dr") as folder, network_nodes(3) as made:
        for node in made:
            start_ray(node, made[0], Path(folder), cpus=0 if node is made[0] else 4)
            time.sleep(5)  # the head first
        yield made


def homes(stack: Stack) -> dict[str, str]:
    """Return the namespace of each worker that serves, by its name."""
    workers: list[dict[str, Any]] = [*stack.account["prefill"], *stack.account["decode"]]
    return {one["name"]: namespace(one["pid"]) for one in workers if "http_port" in one}


def namespace(pid: int) -> str:
    done = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_streams_outlive_a_node_and_redis_and_workers_come_back_elsewhere(
    nodes: list[NetworkNode], model: Path, expected: list[str]
) -> None:
    head = nodes[0]
    assert len(set(expected)) == STREAMS, "the streams cannot be told apart"
    servers = [start_redis()]
    host, port = REDIS
    flags = ("--ray", f"{head.ip}:{HEAD_PORT}", "--redis-url", f"redis://{host}:{port}", "--insecure")
    try:
        with running_stack(
            *flags,
            *(*WORKERS, "--model", str(model), *FLAGS),
            env={"DIPTYCH_SECRET": "ab" * 32, **ENVIRONMENT},
            prefix=head.command(),
        ) as stack:
            assert namespace(stack.account["gateway"]["pid"]) == head.name
            before = homes(stack)
            print("before:", before)
            assert texts(stack, head) == expected
            lost = next(node for node in nodes[1:] if node.name == before["decode-0"])

            def end_node_and_redis() -> None:
                servers[0].kill()
                servers[0].wait()
                lost.kill()
                time.sleep(3)
                servers.append(start_redis())

            assert texts(stack, head, end_node_and_redis) == expected
            deadline = time.monotonic() + BACK_S
            while set(homes(stack)) != set(before) or lost.name in homes(stack).values():
                assert time.monotonic() < deadline, homes(stack)
                time.sleep(0.5)
            print("after:", homes(stack), "without", lost.name)
            assert texts(stack, head) == expected
    finally:
        for one in servers:
            one.kill()
            one.wait()
