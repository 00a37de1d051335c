"""The whole system as its users start it: real processes, the bundled model, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from diptych.client import CallFailed, Client, chat
from diptych.v1 import admin_pb2, admin_pb2_grpc
from tests.diptych.cli.specs import ROOT, alive, wait_until
from tests.end_to_end import tiny_model
from tests.forms import sampled

QUESTION = chat("What is the capital of France?")
START_S = 120
FLAGS = ("--grpc-port=0", "--http-port=0", "--kv-memory-mib=256")


@dataclass(frozen=True)
class System:
    """A running `diptych up`, read through its ready file."""

    process: subprocess.Popen[bytes]
    ready_file: Path

    @property
    def account(self) -> dict[str, Any]:
        account: dict[str, Any] = json.loads(self.ready_file.read_text())
        return account

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.account['gateway']['grpc_port']}"

    def pids(self) -> list[int]:
        said = self.account
        return [one["pid"] for one in (said["valkey"], said["gateway"], *said["prefill"], *said["decode"])]

    def serves_again(self, role: str, before: int) -> bool:
        [worker] = self.account[role]
        return worker["pid"] not in (None, before) and "grpc_port" in worker


def diptych(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "diptych", *arguments]


def start(folder: Path, *flags: str) -> System:
    ready_file = folder / "ready.json"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            diptych("up", *FLAGS, *flags, f"--ready-file={ready_file}"),
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    if not wait_until(lambda: ready_file.exists() or process.poll() is not None, START_S) or process.poll():
        process.kill()
        process.wait()
        pytest.fail(f"diptych up did not start:\n{(folder / 'log').read_text()}")
    return System(process, ready_file)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Ended as by `timeout -s INT`, which signals twice: what runs is finished, nothing is left behind."""
    folder = tmp_path_factory.mktemp("up")
    system = start(folder)
    yield system
    pids = system.pids()
    with Client(system.address) as client:
        stream = client.stream("Once upon a time", max_tokens=200, ignore_eos=True)
        pieces = [next(stream)]
        for _ in range(2):
            system.process.send_signal(signal.SIGINT)
        pieces += stream
    assert sum(len(piece.token_ids) for piece in pieces) == 200
    assert system.process.wait(60) == 0
    assert (
        "stopping: 1 request may finish for 8 s; Ctrl-C again does not wait" in (folder / "log").read_text()
    )
    assert not any(alive(pid) for pid in pids)
    assert not system.ready_file.exists()


def answers(address: str) -> bool:
    try:
        with Client(address) as client:
            return "Paris" in client.generate(QUESTION, max_tokens=24, temperature=0.0, timeout_s=30).text
    except CallFailed:
        return False


def test_up_answers_a_request(system: System) -> None:
    assert answers(system.address)


def test_digest_of_config_is_that_of_version_and_server_info(system: System) -> None:
    done = subprocess.run(
        diptych("config", "--json", *FLAGS), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    digest = json.loads(done.stdout)["digest"]
    gateway = system.account["gateway"]
    for one in (gateway, *system.account["decode"]):
        with urllib.request.urlopen(f"http://127.0.0.1:{one['http_port']}/version", timeout=60) as answer:
            assert json.load(answer)["config_digest"] == digest
    with grpc.insecure_channel(f"127.0.0.1:{gateway['admin_port']}") as channel:
        info = admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo(
            admin_pb2.GetServerInfoRequest(), timeout=60
        )
    assert info.config_digest == digest


def test_generate_streams_the_answer_to_stdout_and_the_times_to_stderr(system: System) -> None:
    flags = ("--stream", "--timings", "--max-tokens=24", "--temperature=0")
    done = subprocess.run(
        diptych("generate", "What is the capital of France?", f"--address={system.address}", *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    for phase in ("queue", "prefill", "handoff", "decode"):
        assert phase in done.stderr


@pytest.mark.full  # what streams feel of it, and that the worker comes back: tests/end_to_end/test_outages.py
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_replaced_and_the_next_request_works(system: System, role: str) -> None:
    before = system.account[role][0]["pid"]
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: system.serves_again(role, before), START_S)
    assert wait_until(lambda: answers(system.address), 60)


def test_an_interrupted_demo_does_not_say_that_it_went_well() -> None:
    with subprocess.Popen(
        diptych("demo"), cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as demo:
        assert demo.stderr is not None
        assert b"valkey is ready" in demo.stderr.readline()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 128 + signal.SIGINT


def test_a_second_gateway_joins_with_the_shared_secrets(system: System) -> None:
    account = system.account
    read, write = os.pipe()
    with subprocess.Popen(
        diptych("gateway", "--grpc-port=0", "--http-port=0", f"--ready-fd={write}"),
        cwd=ROOT,
        env={**os.environ, "DIPTYCH_REDIS_URL": account["redis_url"], "DIPTYCH_SECRET": account["secret"]},
        pass_fds=(write,),
        stderr=subprocess.DEVNULL,
    ) as gateway:
        os.close(write)
        with os.fdopen(read) as pipe:
            address = f"127.0.0.1:{json.loads(pipe.readline())['grpc_port']}"
        assert wait_until(lambda: answers(address), 60)
        gateway.terminate()
        assert gateway.wait(60) == 0


def test_worker_killed_at_its_first_start_is_started_again_while_the_system_serves(tmp_path: Path) -> None:
    http_port, ready_file = free_port(), tmp_path / "ready.json"
    command = diptych(
        *("up", "--grpc-port=0", f"--http-port={http_port}", "--kv-memory-mib=64", "--decode-workers=2"),
        f"--ready-file={ready_file}",
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        assert wait_until(lambda: bool(child_pids(process.pid, "decode-1-")), START_S)
        [victim] = child_pids(process.pid, "decode-1-")
        os.kill(victim, signal.SIGSTOP)
        assert wait_until(lambda: is_ready(http_port), START_S), (tmp_path / "log").read_text()
        os.kill(victim, signal.SIGKILL)
        assert wait_until(ready_file.exists, START_S), (tmp_path / "log").read_text()
        system = System(process, ready_file)
        assert answers(system.address)
        assert wait_until(lambda: "grpc_port" in system.account["decode"][1], START_S)
        assert system.account["decode"][1]["pid"] != victim
        assert "decode-1 ended before it was ready (killed by SIGKILL); starts again in" in (
            tmp_path / "log"
        ).read_text().replace("\n", " ")
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("role", sampled(["prefill", "decode"], ["decode"]))
def test_worker_restarted_while_redis_takes_no_writes_joins(system: System, role: str) -> None:
    with redis.Redis.from_url(system.account["redis_url"]) as directory:
        directory.config_set("maxmemory", 1)
        try:
            before = system.account[role][0]["pid"]
            os.kill(before, signal.SIGKILL)
            assert wait_until(lambda: system.serves_again(role, before), START_S)
            assert wait_until(lambda: answers(system.address), 60)
            assert "has no memory left for writes" in (system.ready_file.parent / "log").read_text()
            listed = subprocess.run(
                diptych("workers", f"--address=127.0.0.1:{system.account['gateway']['admin_port']}"),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert "draining" not in listed.stdout.lower(), listed.stdout
        finally:
            directory.config_set("maxmemory", 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def child_pids(parent: int, name: str) -> list[int]:
    """Return the children of a process with `name` in their command."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_text()]


def is_ready(http_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    model = tiny_model.write(tmp_path / "model")
    system = start(tmp_path, f"--model={model}")
    pids = system.pids()
    system.process.send_signal(signal.SIGKILL)
    system.process.wait(30)
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 30)
    assert set(Path("/dev/shm").iterdir()) <= shared_before
