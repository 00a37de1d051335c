"""The wheel in empty environments: the client alone, the server alone, the load generator alone."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environment import Environment, clean_variables

CLIENT_BYTES = 40_000_000
START_S, STOP_S = 300.0, 60.0
EXTRA = "pip install 'diptych[server]'"

QUESTION = "What is the capital of France?"
LOAD = ("--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4", "--no-progress")

IMPORTS = """
import json, sys
import diptych, diptych.engine
light = sorted({name.partition(".")[0] for name in sys.modules} & {"grpc", "google", "torch", "numpy"})
from diptych import AsyncClient, CallFailed, Client, __version__, chat
print(json.dumps([light, __version__, Client.__name__, diptych.__file__]))
"""
STREAM = """
import json, sys
from diptych import Client, chat
with Client(sys.argv[1]) as client:
    question = chat("What is the capital of France?")
    pieces = [chunk.text for chunk in client.stream(question, max_tokens=24, temperature=0.0)]
print(json.dumps(pieces))
"""


def test_client_environment_is_small(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "client")
    environment.install(wheel)
    assert environment.link_dependencies("diptych") < CLIENT_BYTES
    installed = {one.name for one in PathDistribution.discover(path=[str(environment.site_packages)])}
    assert installed == {"diptych", "grpcio", "protobuf", "googleapis-common-protos", "typing_extensions"}


def test_client_is_exported_lazily(client_environment: Environment, tmp_path: Path) -> None:
    light, version, name, file = client_environment.evaluate(IMPORTS, tmp_path)  # type: ignore[misc]
    assert (light, name) == ([], "Client")
    assert version == client_environment.evaluate(
        "import json, importlib.metadata; print(json.dumps(importlib.metadata.version('diptych')))", tmp_path
    )
    assert Path(file).is_relative_to(client_environment.folder)


@pytest.mark.parametrize("command", [("diptych", "up"), ("python", "-m", "diptych", "doctor")])
def test_command_without_the_server_names_the_extra(
    command: tuple[str, ...], client_environment: Environment, tmp_path: Path
) -> None:
    done = client_environment.run(*command, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert EXTRA in done.stderr


@contextlib.contextmanager
def running_server(environment: Environment, folder: Path, **variables: str) -> Iterator[dict[str, Any]]:
    """Run `diptych up` of `environment` in `folder`; yields its ready file."""
    ready, log = folder / "ready.json", folder / "log.txt"
    flags = ["--ready-file", str(ready), "--grpc-port", "0", "--http-port", "0"]
    command = [str(environment.folder / "bin" / "diptych"), "up", *flags]
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, cwd=folder, env={**clean_variables(), **variables}, stdout=sink, stderr=sink
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield json.loads(ready.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
    assert process.returncode == 0, log.read_text()


def test_installed_client_streams_from_the_installed_server_among_shadowing_modules(
    server_environment: Environment, client_environment: Environment, shadows: Path, tmp_path: Path
) -> None:
    with running_server(server_environment, tmp_path, PYTHONPATH=str(shadows)) as account:
        gateway = account["gateway"]
        address = f"127.0.0.1:{gateway['grpc_port']}"
        done = client_environment.run("python", "-P", "-c", STREAM, address, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        pieces = json.loads(done.stdout)
        assert len(pieces) > 1
        assert "Paris" in "".join(pieces)
        admin = f"127.0.0.1:{gateway['admin_port']}"
        for expected, arguments in (
            ("Paris", ("generate", QUESTION, "--temperature", "0", "--address", address)),
            ("decode-0", ("workers", "--address", admin)),
            ("throughput", ("bench", "--address", address, *LOAD)),
        ):
            done = server_environment.run("diptych", *arguments, folder=tmp_path, PYTHONPATH=str(shadows))
            assert done.returncode == 0, done.stderr
            assert expected in done.stdout
        for worker in (*account["prefill"], *account["decode"]):
            maps = Path(f"/proc/{worker['pid']}/maps").read_text()
            assert str(server_environment.site_packages / "kernels/cpu/_step.so") in maps


@pytest.mark.parametrize(
    "command", ["gateway", "prefill", "decode", "up", "demo", "restart", "drain", "flush"]
)
def test_command_works_among_shadowing_modules(
    command: str, server_environment: Environment, shadows: Path, tmp_path: Path
) -> None:
    done = server_environment.run("diptych", command, "--help", folder=tmp_path, PYTHONPATH=str(shadows))
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


def test_doctor_names_the_shadowing_modules(
    server_environment: Environment, shadows: Path, tmp_path: Path
) -> None:
    done = server_environment.run("diptych", "doctor", folder=tmp_path, PYTHONPATH=str(shadows))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"passed over: {shadows}/gateway.py, {shadows}/kernels.py" in done.stdout


def test_load_generator_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "bench")
    environment.install(wheel)
    environment.link_dependencies("diptych", "bench")
    assert not (environment.site_packages / "torch").exists()
    done = environment.run("diptych", "bench", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
