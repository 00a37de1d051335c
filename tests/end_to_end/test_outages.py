"""Parts of a system die: a worker costs its streams a status and comes back, without Redis all goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import grpc
import pytest

from diptych.client import AsyncClient, CallFailed
from tests.end_to_end import reference
from tests.end_to_end.http_requests import greedy_answer, greedy_tokens
from tests.end_to_end.stack import Stack, running_stack

MAX_TOKENS = 8
LEASE_S = 3.0
PATIENCE_S = 60.0  # for what takes well below three seconds on a machine that does nothing else


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Damaged by every test, and whole again after each but the last."""
    # A gateway that waits for another worker would take the streams up again when the killed one is back.
    flags = ("--dtype", "fp32", "--set", "gateway.local-prefill=never")
    with running_stack(*flags, "--set", "gateway.worker-wait-timeout=0") as running:
        yield running


async def streams_through_a_death(stack: Stack, role: str) -> list[tuple[grpc.StatusCode, bool]]:
    """Kill the worker under running streams; each stream's first status, and whether it had tokens."""
    pid = stack.account[role][0]["pid"]
    outcomes: list[tuple[grpc.StatusCode, bool]] = []
    async with AsyncClient(stack.address, retries=0) as client:

        async def one(prompt: tuple[int, ...], begun: asyncio.Event) -> None:
            try:
                async for _ in client.stream(prompt, max_tokens=2000, temperature=0.0, ignore_eos=True):
                    begun.set()
                outcomes.append((grpc.StatusCode.OK, begun.is_set()))
            except CallFailed as error:
                outcomes.append((error.code, begun.is_set()))

        def start(prompt: tuple[int, ...]) -> tuple[asyncio.Task[None], asyncio.Event]:
            begun = asyncio.Event()
            return asyncio.create_task(one(prompt, begun)), begun

        short = [start(reference.prompts()[10]) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            for _, begun in short:
                await begun.wait()
        long = [start(reference.prompts()[-1]) for _ in range(2)]
        await asyncio.sleep(0.3)  # their prompts take seconds
        os.kill(pid, signal.SIGKILL)
        tasks = [task for task, _ in (*short, *long)]
        if role == "prefill":
            # Streams that are past prefill go on; those are ended by us once the others have their status.
            await asyncio.wait(tasks[2:], timeout=PATIENCE_S)
            for task in tasks[:2]:
                task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks), "a stream hangs"
    return outcomes


async def answer_after_restart(address: str) -> tuple[int, ...]:
    """The first answer that succeeds; until then only UNAVAILABLE is allowed."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await greedy_answer(address, reference.prompts()[21], MAX_TOKENS)
        except CallFailed as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.full), "decode"])
def test_a_killed_worker_costs_a_status_and_comes_back(stack: Stack, role: str) -> None:
    before = stack.account[role][0]["pid"]
    outcomes = asyncio.run(streams_through_a_death(stack, role))
    assert len(outcomes) == (2 if role == "prefill" else 4), "a status for each that cannot go on"
    for code, got_tokens in outcomes:
        assert code is (grpc.StatusCode.ABORTED if got_tokens else grpc.StatusCode.UNAVAILABLE)
    tokens = asyncio.run(answer_after_restart(stack.address))
    assert reference.is_greedy(reference.prompts()[21], tokens, MAX_TOKENS)
    assert stack.account[role][0]["pid"] != before
    stack.wait_idle(PATIENCE_S)


@pytest.mark.full  # the one above waits for that, too
def test_a_killed_prefill_worker_leaves_no_block_behind(stack: Stack) -> None:
    """The decode worker survives it: what was granted to the dead writer is free again, unasked."""
    asyncio.run(streams_through_a_death(stack, "prefill"))
    stack.wait_idle(PATIENCE_S)  # the prefill worker has to come back first
    asyncio.run(answer_after_restart(stack.address))


async def answers(address: str) -> list[tuple[int, ...]]:
    """Greedy answers to short prompts beyond the end of every lease; any error fails the test."""
    prompts = reference.prompts()[:12]
    got: list[tuple[int, ...]] = []
    until = time.monotonic() + LEASE_S + 1
    async with AsyncClient(address) as client:
        while time.monotonic() < until or len(got) < len(prompts):
            got.append(await greedy_tokens(client, prompts[len(got) % len(prompts)], MAX_TOKENS))
    return got


@pytest.mark.full  # tests/faults/test_redis_faults.py does so with a smaller model
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_requests_succeed_while_redis_is_dead_or_frozen(stack: Stack, how: signal.Signals) -> None:
    """Redis is a hint."""
    valkey = stack.account["valkey"]["pid"]
    os.kill(valkey, how)
    try:
        got = asyncio.run(answers(stack.address))
    finally:
        if how is signal.SIGSTOP:
            os.kill(valkey, signal.SIGCONT)
    assert got == [reference.greedy(reference.prompts()[n % 12], MAX_TOKENS) for n in range(len(got))]
