"""A real gateway process with 256 descriptors, and clients that open 300 connections and leave them idle."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

IDLE = 300


@dataclass(frozen=True)
class FewDescriptors:
    """The process, by its ports and its log."""

    grpc_port: int
    http_port: int
    log: Path


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FewDescriptors]:
    log = tmp_path_factory.mktemp("few") / "log"
    read, write = os.pipe()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway", "--grpc-port=0", "--http-port=0", "--admin-port=0"),
                *("--redis-url=redis://127.0.0.1:1/0", f"--ready-fd={write}"),
            ],
            pass_fds=(write,),
            stderr=stderr,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        )
    os.close(write)
    with os.fdopen(read) as pipe:
        said = json.loads(pipe.readline())
    yield FewDescriptors(said["grpc_port"], said["http_port"], log)
    process.terminate()
    process.wait(30)


def health(gateway: FewDescriptors) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def http_status(gateway: FewDescriptors, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{gateway.http_port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_gateway_warns_of_few_descriptors_at_its_start(gateway: FewDescriptors) -> None:
    assert "only 256 open files are allowed" in gateway.log.read_text()


@pytest.mark.parametrize("port", ["http", "grpc", "both"])
def test_probes_are_answered_beside_idle_connections(gateway: FewDescriptors, port: str) -> None:
    ports = {"http": [gateway.http_port], "grpc": [gateway.grpc_port]}
    with ExitStack() as stack:
        for number in ports.get(port, [gateway.http_port, gateway.grpc_port]):
            for _ in range(IDLE):
                stack.enter_context(socket.create_connection(("127.0.0.1", number), 10))
        time.sleep(0.5)
        assert http_status(gateway, "/health") == 200
        assert http_status(gateway, "/ready") == 503
        assert http_status(gateway, "/metrics") == 200
        assert health(gateway)
