"""Another gateway beside that of a running system."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.end_to_end.stack import Stack

READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class SecondGateway:
    """A process that serves."""

    address: str
    pid: int
    admin_address: str


@contextlib.contextmanager
def second_gateway(
    stack: Stack, model: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[SecondGateway]:
    """Ready when it is entered; killed afterwards, if it still lives. No model: the bundled one."""
    reader, writer = os.pipe()
    account = stack.account
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gateway"),
            *(() if model is None else ("--model", str(model), "--model-name", "tiny")),
            *("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--ready-fd", str(writer)),
        ],
        pass_fds=[writer],
        env={
            **os.environ,
            **(environment or {}),
            "DIPTYCH_REDIS_URL": account["redis_url"],
            "DIPTYCH_SECRET": account["secret"],
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            ports = json.loads(pipe.readline())
        address, admin = (f"127.0.0.1:{ports[name]}" for name in ("grpc_port", "admin_port"))
        _wait_serving(address)
        yield SecondGateway(address, process.pid, admin)
    finally:
        process.kill()
        process.wait()


def _wait_serving(address: str) -> None:
    until = time.monotonic() + READY_WITHIN_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="diptych.v1.InferenceService")
        while stub.Check(request, timeout=10).status != health_pb2.HealthCheckResponse.SERVING:
            if time.monotonic() > until:
                raise AssertionError("the second gateway has found no workers")
            time.sleep(0.05)
