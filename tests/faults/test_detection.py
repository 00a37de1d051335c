"""Workers that hang or are slow: noticed, left, and taken back when they are well.

The long form stops workers twenty times and prints how soon the next token came:

    make test-full ARGS="tests/faults/test_detection.py -s"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from diptych.bench.figures import percentile
from diptych.client import AsyncClient
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import REQUEST_GAUGES, Stack, running_stack
from tests.faults.gauges import Gauges
from tests.faults.system import eventually

TOKENS = 400
PATIENCE_S = 120.0
PROMPT = tiny_model.prompt(5, 40)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    flags = ("--model", str(folder), "--model-name", "tiny", "--dtype", "fp32", "--kv-blocks", "256")
    with running_stack(*flags, "--prefill-workers", "2", "--decode-workers", "2") as stack:
        yield stack, folder


def workers(stack: Stack) -> list[pb.WorkerInfo]:
    with grpc.insecure_channel(stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return list(stub.ListWorkers(pb.ListWorkersRequest(), timeout=5).workers)


def all_ready(stack: Stack) -> bool:
    return all(worker.state == pb.WORKER_STATE_READY for worker in workers(stack))


async def stream(address: str, on_token: Callable[[int], None] = lambda _: None) -> list[int]:
    ids: list[int] = []
    async with AsyncClient(address) as client:
        async for chunk in client.stream(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
            ids += chunk.token_ids
            on_token(len(ids))
    return ids


def busy_decode(stack: Stack) -> int:
    """The process of a decode worker that has a request, by its own word; 0 = none. What the gateway knows is
    up to a heartbeat old: too old for a stream that takes as long as that.
    """
    for one in stack.account["decode"]:
        with contextlib.closing(Gauges(one["http_port"])) as gauges:
            if any(name.startswith(REQUEST_GAUGES) for name in gauges.busy()):
                return int(one["pid"])
    return 0


def stopped_at_token(stack: Stack, wanted: int) -> tuple[list[int], float]:
    """Stop the decode worker of a stream when so many tokens are out: all its tokens, and the longest pause
    after that in seconds.
    """
    stopped: list[int] = []
    gap = 0.0

    def on_token(count: int) -> None:
        nonlocal gap, last
        if count >= wanted and not stopped:
            pid = eventually(lambda: busy_decode(stack), PATIENCE_S, "a decode worker runs something")
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        elif stopped:
            gap = max(gap, time.monotonic() - last)
        last = time.monotonic()

    last = time.monotonic()
    try:
        ids = asyncio.run(stream(stack.address, on_token))
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert stopped
    return ids, gap


@pytest.mark.full  # test_campaigns.py stops one in every run
def test_a_stream_goes_on_when_its_worker_is_stopped(house: tuple[Stack, Path]) -> None:
    stack, _ = house
    undisturbed = asyncio.run(stream(stack.address))
    ids, gap = stopped_at_token(stack, 20)
    assert ids == undisturbed
    print(f"\nfrom SIGSTOP to the next token: {gap:.2f} s")
    eventually(lambda: all_ready(stack), PATIENCE_S, "all workers are ready")
    stack.wait_idle(timeout_s=60)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_how_soon_streams_go_on(house: tuple[Stack, Path]) -> None:
    stack, _ = house
    undisturbed = asyncio.run(stream(stack.address))
    gaps = []
    for turn in range(20):
        ids, gap = stopped_at_token(stack, 5 + 7 * turn)
        assert ids == undisturbed
        gaps.append(gap)
        eventually(lambda: all_ready(stack), PATIENCE_S, "all workers are ready")
    gaps.sort()
    print(f"\nfrom SIGSTOP to the next token: p50 {percentile(gaps, 50):.2f} s, most {gaps[-1]:.2f} s")


@contextlib.contextmanager
def slow_worker(stack: Stack, folder: Path) -> Iterator[str]:
    """One more decode worker, of which every step takes 0.15 s longer; its id."""
    account = stack.account
    environment = {
        **os.environ,
        "DIPTYCH_REDIS_URL": account["redis_url"],
        "DIPTYCH_SECRET": account["secret"],
        "DIPTYCH_FAILPOINTS": "worker.slow_step",
    }
    command = [sys.executable, "-m", "decode_worker", "--model", str(folder), "--model-name", "tiny"]
    command += ["--dtype", "fp32", "--kv-blocks", "256", "--grpc-port", "0", "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--worker-id", "snail", "--worker-shutdown-timeout", "1"], env=environment
    )
    try:
        yield "snail"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.full
def test_a_slow_worker_is_ejected_and_says_why(house: tuple[Stack, Path]) -> None:
    stack, folder = house

    def snail() -> pb.WorkerInfo:
        return next((w for w in workers(stack) if w.worker_id == "snail"), pb.WorkerInfo())

    def ejected() -> bool:
        return "ejected" in snail().detail

    async def load_until_ejected() -> None:
        """Streams all the time, so that every worker has steps to report."""
        over = asyncio.Event()

        async def client() -> None:
            async with AsyncClient(stack.address) as one:
                while not over.is_set():
                    await one.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(client())
            try:
                await asyncio.to_thread(eventually, ejected, PATIENCE_S, "the slow worker is ejected")
            finally:
                over.set()

    with slow_worker(stack, folder):
        eventually(lambda: snail().state == pb.WORKER_STATE_READY, PATIENCE_S, "the slow worker is ready")
        asyncio.run(load_until_ejected())
        assert "times as long as its peers'" in snail().detail
        eventually(lambda: snail().load.running == 0, PATIENCE_S, "nothing runs on the slow worker")
        started = time.monotonic()
        asyncio.run(stream(stack.address))  # none of it on the slow one: that would take a minute
        assert snail().load.running == 0
        assert time.monotonic() - started < TOKENS * 0.15
