"""A system as an application of Ray Serve, as KubeRay's RayService starts, watches and replaces them.

A replica runs `diptych up --ray` on its node and forwards HTTP to the gateway, streams as they come. Ray
Serve knows by the replica's health whether the system serves, and starts another replica, and so the system,
where it does not. gRPC clients reach the gateway's own port.

`import_path: diptych.cli.ray_cluster.serve_application:application`, `args: {flags: "--model … --insecure"}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diptych.runtime.python_module import module_command

_READY_S = 900.0
"""Seconds that a system may take to start: a model may have to be downloaded."""
_STOP_S = 60.0
_TETHER = Path(__file__).parents[1] / "parent_death.py"
_OF_ONE_HOP = {
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
}
"""Headers that are between two ends of a connection (RFC 9110 §7.6.1), and those that are made anew."""


class Arguments(BaseModel):
    """Arguments of the application in a Serve config."""

    flags: str = ""
    """Flags of `diptych up`, as in a shell. The gateway's HTTP port is always a free one."""


def application(args: Arguments) -> serve.Application:
    """Return a system with these flags as an application."""
    deployment = serve.deployment(
        name="diptych",
        num_replicas=1,
        max_ongoing_requests=100_000,  # the gateway has limits of its own
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=10,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=_STOP_S + 30,
    )
    bound: serve.Application = deployment(Replica).bind(args.flags)
    return bound


class SystemStopped(Exception):
    """The command has ended, or its gateway cannot route requests."""


class Replica:
    """Replica of the application: one system. `flags` are those of `diptych up`."""

    async def __init__(self, flags: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start a system and wait until it serves. Raises SystemStopped when it does not."""
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-serve-")
        self._targets = Path(self._folder.name, "targets.json")
        address = ray.get_runtime_context().gcs_address
        own = ["--ray", address, "--ray-targets", str(self._targets), "--http-port", "0"]
        # On the loop's thread, whose end the kernel reports to the command: it outlives no replica.
        self._process = _start([*module_command("diptych"), "up", *shlex.split(flags), *own])
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        try:
            async with asyncio.timeout(_READY_S):
                while not self._targets.exists():
                    self._check_process()
                    await asyncio.sleep(0.5)
        except TimeoutError:
            self._stop()
            raise SystemStopped(f"the system was not ready after {_READY_S:.0f} s") from None

    async def check_health(self) -> None:
        """Raise SystemStopped where the system cannot serve; workers that restart are its own business."""
        self._check_process()
        try:
            async with self._session.get(f"{self._gateway()}/health") as answer:
                if answer.status != 200:
                    raise SystemStopped(f"the gateway says {answer.status}")
        except aiohttp.ClientError as error:
            # The command starts a gateway again that ends, where its node is.
            print(f"diptych: the gateway does not answer: {error}", file=sys.stderr, flush=True)

    async def __call__(self, request: Request) -> Response:
        """Forward a request to the gateway."""
        headers = [
            (name, value) for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP
        ]
        try:
            upstream = await self._session.request(
                request.method,
                f"{self._gateway()}{_target(request)}",
                headers=headers,
                data=await request.body(),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError):
            body = {"error": {"message": "the gateway is starting again", "type": "unavailable"}}
            return Response(json.dumps(body), 503, {"retry-after": "2"}, "application/json")
        kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _OF_ONE_HOP}
        return StreamingResponse(_pieces(upstream), upstream.status, kept)

    def __del__(self) -> None:
        """End the system, which waits for its streams first."""
        if hasattr(self, "_process"):
            self._stop()

    def _gateway(self) -> str:
        """Return the URL of the gateway, which moves where its node is lost."""
        programs: list[dict[str, Any]] = json.loads(self._targets.read_text())
        for one in programs:
            if one["labels"]["role"] == "gateway":
                return f"http://{one['targets'][0]}"
        raise aiohttp.ClientConnectionError("it is starting again")

    def _check_process(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise SystemStopped(f"diptych up ended with status {status}")

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command that the kernel ends with this thread. The pipe's other end stays open as long as this
    process.
    """
    ours, alive = os.pipe()
    try:
        tether = [sys.executable, "-I", str(_TETHER), str(ours), *command]
        # A session of its own: signals for Ray's processes are not for it.
        process = subprocess.Popen(tether, pass_fds=[ours], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        os.close(alive)
        raise
    finally:
        os.close(ours)
    return process


def _target(request: Request) -> str:
    """Return path and query of a request, below the application's prefix."""
    path: str = request.url.path.removeprefix(request.scope.get("root_path", "").rstrip("/"))
    return path + (f"?{request.url.query}" if request.url.query else "")


async def _pieces(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield an answer as it comes. A caller that leaves closes it, and the gateway ends its request."""
    try:
        async for piece in upstream.content.iter_any():
            yield piece
    finally:
        upstream.close()
