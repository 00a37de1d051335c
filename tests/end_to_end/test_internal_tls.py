"""A whole system whose programs reach each other over TLS only: answers, a stranger, a renewal under load."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from diptych.client import Client
from tests.diptych.runtime.authority import Authority
from tests.end_to_end import tiny_model
from tests.end_to_end.rank_processes import GREEDY, alone, answer
from tests.end_to_end.stack import Stack, running_stack, tail

TOKENS = 48
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]
OVER_NETWORK = ("--transport", "tcp", "--set", "prefill.worker-rpc=grpc", "--set", "decode.worker-rpc=grpc")


@dataclass(frozen=True)
class Secured:
    stack: Stack
    model: Path
    certificates: Path
    expected: list[list[int]]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    model = tiny_model.write(folder / "model")
    certificates = Authority().issue_all(folder / "certificates")
    flags = ["--model", str(model), "--dtype", "fp32", "--kv-blocks", "96", *OVER_NETWORK]
    flags += ["--set", "decode.max-local-prefill-tokens=0", "--internal-tls", str(certificates)]
    with running_stack(*flags, env={"DIPTYCH_WORKER_WAIT_TIMEOUT": "100"}) as stack:
        yield Secured(stack, model, certificates, alone(model, 1, PROMPTS, TOKENS))


def logged(stack: Stack, *words: str, within_s: float = 60) -> None:
    until = time.monotonic() + within_s
    while not any(all(word in line for word in words) for line in stack.log.read_text().splitlines()):
        assert time.monotonic() < until, tail(stack.log)
        time.sleep(0.1)


def served_certificate(stack: Stack, role: str) -> str:
    return ssl.get_server_certificate(("127.0.0.1", stack.account[role][0]["http_port"]))


def test_everything_is_answered_and_nothing_without_a_certificate(secured: Secured) -> None:
    stack = secured.stack
    assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == secured.expected
    logged(stack, "linked to decode worker", "transport tcp")
    for role in ("prefill", "decode"):
        with grpc.insecure_channel(f"127.0.0.1:{stack.account[role][0]['grpc_port']}") as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_strangers_worker_is_refused_by_name_and_gets_nothing(secured: Secured, tmp_path: Path) -> None:
    stack = secured.stack
    folder = Authority().issue(tmp_path / "stranger", "decode")
    command = [sys.executable, "-m", "decode_worker", "--worker-id", "stranger", "--worker-rpc", "grpc"]
    command += ["--model", str(secured.model), "--dtype", "fp32", "--kv-blocks", "4096"]
    command += ["--transport", "tcp", "--internal-tls", str(folder)]
    environment = {**os.environ, "DIPTYCH_REDIS_URL": stack.account["redis_url"]}
    with (tmp_path / "log").open("wb") as log:
        stranger = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        logged(stack, "decode worker stranger", "its certificate is not one that our ca.crt signed")
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == secured.expected
    finally:
        stranger.terminate()
        stranger.wait(30)


def test_certificates_replaced_under_load_cost_no_answer(secured: Secured) -> None:
    """An authority that nobody knew signs all of them in the middle of streams; then a worker dies."""
    stack, before = secured.stack, served_certificate(secured.stack, "prefill")
    tokens: list[int] = []
    with Client(stack.address, retries=0) as client:
        for chunk in client.stream(PROMPTS[2], max_tokens=TOKENS, timeout_s=200, **GREEDY):
            tokens += chunk.token_ids
            if len(tokens) == 1:
                Authority().issue_all(secured.certificates)
                time.sleep(1.2)  # files are looked at once a second
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stack.account["decode"][0]["pid"], signal.SIGKILL)
    assert tokens == secured.expected[2]
    assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == secured.expected
    assert served_certificate(stack, "prefill") != before
    assert stack.account["prefill"][0]["restarts"] == 0
