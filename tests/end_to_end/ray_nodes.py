"""Nodes of a Ray cluster in network namespaces of their own, each with an address on one bridge."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEAD_PORT = 6391
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Variables of the cluster, and of all that joins it."""


def may_make_namespaces() -> bool:
    """Return whether this process may make network namespaces and bridges."""
    name = f"diptych-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=False)
    return made


@dataclass
class NetworkNode:
    """A namespace with the address `ip`, and the processes that were started in it."""

    name: str
    ip: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *argv: str | Path) -> list[str]:
        """Return the command that runs in the namespace."""
        return ["ip", "netns", "exec", self.name, *map(str, argv)]

    def kill(self) -> None:
        """End every process in the namespace at once, as a power cut does."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def network_nodes(count: int) -> Iterator[list[NetworkNode]]:
    """Make namespaces on one bridge; they end with all that runs in them."""
    tag = f"d{os.getpid() % 100_000}"
    nodes = [NetworkNode(f"{tag}n{number}", f"10.213.7.{number + 2}") for number in range(count)]
    try:
        _ip("link", "add", f"{tag}b", "type", "bridge")
        _ip("addr", "add", "10.213.7.1/24", "dev", f"{tag}b")
        _ip("link", "set", f"{tag}b", "up")
        for number, node in enumerate(nodes):
            _ip("netns", "add", node.name)
            _ip("link", "add", f"{tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", node.name)
            _ip("link", "set", f"{tag}v{number}", "master", f"{tag}b", "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "addr", "add", f"{node.ip}/24", "dev", "eth0")
            _ip("-n", node.name, "link", "set", "eth0", "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            _ip("netns", "delete", node.name, check=False)
        _ip("link", "delete", f"{tag}b", check=False)


def start_ray(node: NetworkNode, head: NetworkNode, folder: Path, cpus: int) -> None:
    """Start Ray's processes of a node, in the foreground of a process of ours."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    where = (
        ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
        if node is head
        else [f"--address={head.ip}:{HEAD_PORT}"]
    )
    options = [f"--node-ip-address={node.ip}", f"--num-cpus={cpus}", "--object-store-memory=80000000"]
    command = node.command(*ray, *where, *options, f"--temp-dir={folder / node.name}" if node is head else "")
    with (folder / f"{node.name}.log").open("wb") as log:
        node.processes.append(
            subprocess.Popen(
                [one for one in command if one], stdout=log, stderr=log, env=os.environ | ENVIRONMENT
            )
        )


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30)
