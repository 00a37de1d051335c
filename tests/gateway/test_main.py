"""Gateway program: starts without Redis and torch, announces readiness, drains and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.forms import FULL

ROOT = Path(__file__).parents[2]


def test_gateway_program_starts_serves_and_stops() -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gateway", "--grpc-port", "0", "--http-port", "0"),
            *("--redis-url", "redis://127.0.0.1:1/0", "--ready-fd", str(writer)),
        ],
        pass_fds=[writer],
        cwd=ROOT,
        env={**os.environ, "DIPTYCH_SECRET": "ab" * 32},
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            ports = json.loads(pipe.readline())
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['http_port']}/health", timeout=60) as answer:
            assert answer.status == 200
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            ready = stub.Check(health_pb2.HealthCheckRequest(service="diptych.v1.InferenceService"))
        assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert "redis://127.0.0.1:1/0 does not answer (ConnectionError): start one, or give --redis-url" in log


@pytest.mark.parametrize(
    ("content", "flags", "problem"),
    [
        (
            None,
            ("--model", "{folder}"),
            "{folder} is empty: a model is a .gguf file or a folder with config.json",
        ),
        pytest.param(
            "no model",
            ("--model", "{folder}/model.gguf"),
            "model.gguf is no GGUF file, though it is named so: a model is",
            marks=FULL,
        ),
        pytest.param(None, ("--model", "{folder}/nothing"), "no model at", marks=FULL),
        (None, ("--http-port", "{taken}"), "cannot listen on 127.0.0.1:{taken}: address already in use"),
        (None, ("--grpc-port", "{taken}"), "cannot listen on 127.0.0.1:{taken}: taken by another process"),
        pytest.param(None, ("--host", "0.0.0.0"), "refusing to listen on 0.0.0.0", marks=FULL),
    ],
)
def test_user_error_is_reported_in_one_line(
    content: str | None, flags: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "model.gguf").write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"folder": tmp_path, "taken": server.getsockname()[1]}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gateway", "--grpc-port=0", "--http-port=0"),
                *("--redis-url=redis://127.0.0.1:1/0", *(flag.format(**values) for flag in flags)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "cannot start: " in line]
    assert problem.format(**values) in line


def test_help_describes_the_ports() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = " ".join(done.stdout.split())
    assert "Port of OpenAI's API, /metrics, /health and /ready" in said
    assert "─ Admission ─" in said
    assert "``" not in said
    assert "null" not in said


def test_unknown_flag_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--no-such-flag", "1"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2
