"""`diptych up --ray` on real clusters: one that it starts itself, and one of several nodes that lose one.

Ray is no dependency of the tests: they are skipped where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.client import Client
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.gateway.running_gateway import valkey

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.timeout(900),
]
TOKENS = 500
FLAGS = ("--dtype", "fp32", "--model-name", "tiny", "--set", "gateway.worker-wait-timeout=240")
BACK_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Return the tokens of the same request to `diptych up` without Ray."""
    with running_stack("--model", str(model), *FLAGS) as stack:
        return tokens(stack)


def tokens(stack: Stack, disturb: Callable[[], None] | None = None) -> list[int]:
    """Return the tokens of one stream; `disturb` is called beside it, once it has begun."""
    found: list[int] = []
    aside: threading.Thread | None = None
    with Client(stack.address) as client:
        for piece in client.stream(
            "Once upon a time", max_tokens=TOKENS, temperature=0.0, ignore_eos=True, timeout_s=400
        ):
            found += piece.token_ids
            if disturb is not None and aside is None and len(found) > 8:
                aside = threading.Thread(target=disturb)
                aside.start()
    if aside is not None:
        aside.join()
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + BACK_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def pids(stack: Stack, role: str) -> list[int | None]:
    """Return the processes of a role; None for one that does not serve."""
    return [one["pid"] if "http_port" in one else None for one in stack.account[role]]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_stream_outlives_the_actor_of_a_worker(model: Path, expected: list[int], role: str) -> None:
    with running_stack("--ray", "--model", str(model), *FLAGS) as stack:
        [before] = pids(stack, role)
        assert before is not None

        def kill_actor() -> None:
            os.kill(parent(before), signal.SIGKILL)

        assert tokens(stack, kill_actor) == expected
        until(lambda: pids(stack, role)[0] not in (before, None))
        until(lambda: not Path(f"/proc/{before}").exists())  # it ends when its actor's pipe does
        assert tokens(stack) == expected


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Start a head without CPUs, and two nodes with room for a pair each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def test_a_stream_outlives_a_node_and_its_pair_comes_back_on_another(
    cluster: Any, model: Path, expected: list[int], tmp_path: Path
) -> None:
    targets = tmp_path / "targets.json"
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    with (
        valkey() as redis_url,
        running_stack(
            *(
                "--ray",
                cluster.address,
                "--redis-url",
                redis_url,
                "--insecure",
                "--ray-targets",
                str(targets),
            ),
            *("--prefill-workers", "2", "--decode-workers", "2", "--model", str(model), *FLAGS),
            env={"DIPTYCH_SECRET": "ab" * 32},
        ) as stack,
    ):
        before = {role: pids(stack, role) for role in ("prefill", "decode")}
        homes = {role: [raylet_of(pid, raylets) for pid in found] for role, found in before.items()}
        assert homes["prefill"] == homes["decode"], "a pair is on one node"
        assert len(set(homes["decode"])) == 2

        def remove_busy_node() -> None:
            busy = next(n for n in range(2) if running(targets, f"decode-{n}"))
            cluster.remove_node(raylets[homes["decode"][busy]], allow_graceful=False)

        assert tokens(stack, remove_busy_node) == expected
        cluster.add_node(num_cpus=2)  # by this thread: Ray installs a handler of signals

        def replaced(role: str) -> bool:
            now = pids(stack, role)
            return None not in now and len(set(now) & set(before[role])) == 1

        until(lambda: all(replaced(role) for role in before))  # Ray takes a while to call a node dead
        assert tokens(stack) == expected


def raylet_of(pid: int | None, raylets: dict[int, Any]) -> int:
    """Return the process of the node on which a program runs: its actor's parent, or that one's."""
    assert pid is not None
    while pid not in raylets:
        pid = parent(pid)
    return pid


def running(targets: Path, program: str) -> bool:
    """Return whether a program has requests, by its /metrics."""
    [target] = [
        one["targets"][0] for one in json.loads(targets.read_text()) if one["labels"]["program"] == program
    ]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return any(
        float(line.rpartition(" ")[2]) > 0 for line in lines if line.startswith("diptych_requests_running")
    )
