"""Clients that go away and workers that die: nothing leaks, nobody hangs, the next request works."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import grpc
import pytest

from diptych.client import AsyncClient, CallFailed
from tests.end_to_end import reference
from tests.end_to_end.asking import greedy_tokens
from tests.end_to_end.stack import Stack, running_stack

CANCELS = 500


async def cancel_at_random(address: str, count: int, seed: int) -> dict[str, int]:
    """Start streams, leave each after a random time; how far they had come."""
    rng = random.Random(seed)
    prompts = reference.prompts()
    gate = asyncio.Semaphore(8)
    came = {"nothing": 0, "tokens": 0, "finished": 0}
    async with AsyncClient(address) as client:

        async def one(prompt: tuple[int, ...], after: float) -> None:
            tokens = 0

            async def read() -> None:
                nonlocal tokens
                async for chunk in client.stream(prompt, max_tokens=64, temperature=0.0, ignore_eos=True):
                    tokens += len(chunk.token_ids)

            async with gate:
                task = asyncio.create_task(read())
                _, running = await asyncio.wait([task], timeout=after)
                task.cancel()
                await asyncio.wait([task])
                came["finished" if not running else "tokens" if tokens else "nothing"] += 1

        # Mostly short prompts, and two kinds of patience, so that every phase meets its share of cancels.
        short = [prompt for prompt in prompts if len(prompt) <= 65]
        plans = [
            (rng.choice(prompts if n % 10 == 0 else short), rng.expovariate(20 if n % 2 else 1.5))
            for n in range(count)
        ]
        await asyncio.gather(*(one(prompt, after) for prompt, after in plans))
    return came


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", pytest.param("gloo", marks=pytest.mark.full)])
def test_500_cancels_at_random_instants_leak_nothing(transport: str) -> None:
    with running_stack("--dtype", "fp32", "--transport", transport, "--kv-blocks", "600") as stack:
        came = asyncio.run(cancel_at_random(stack.address, CANCELS, seed=7))
        stack.wait_idle()
        tokens = asyncio.run(one_answer(stack.address))
    assert came["nothing"] > 20, f"too few cancels before the first token: {came}"
    assert came["tokens"] > 20, f"too few cancels after the first token: {came}"
    assert tokens == reference.greedy(reference.prompts()[20], 16)


async def one_answer(address: str) -> tuple[int, ...]:
    async with AsyncClient(address) as client:
        return await greedy_tokens(client, reference.prompts()[20], 16)


async def streams_through_a_death(stack: Stack, role: str) -> list[tuple[grpc.StatusCode, bool, float]]:
    """Kill the worker under running streams; each stream's status, whether it had tokens, seconds to it."""
    pid = stack.account[role][0]["pid"]
    killed_at = 0.0
    outcomes: list[tuple[grpc.StatusCode, bool, float]] = []
    async with AsyncClient(stack.address) as client:

        async def one(prompt: tuple[int, ...]) -> None:
            got = False
            try:
                async for _ in client.stream(prompt, max_tokens=2000, temperature=0.0, ignore_eos=True):
                    got = True
                outcomes.append((grpc.StatusCode.OK, got, time.monotonic() - killed_at))
            except CallFailed as error:
                outcomes.append((error.code, got, time.monotonic() - killed_at))

        long, short = reference.prompts()[-1], reference.prompts()[10]
        tasks = [asyncio.create_task(one(prompt)) for prompt in (short, short, long, long)]
        await asyncio.sleep(1.0)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if role == "prefill":
            # Streams that are past prefill go on; those are ended by us once the others have their status.
            await asyncio.wait(tasks[2:], timeout=10)
            for task in tasks[:2]:
                task.cancel()
        await asyncio.wait(tasks, timeout=10)
        assert all(task.done() for task in tasks), "a stream hangs"
    return outcomes


async def answer_after_restart(address: str) -> tuple[int, ...]:
    """The first answer that succeeds; until then only UNAVAILABLE is allowed."""
    until = time.monotonic() + 60
    while True:
        try:
            return await one_answer(address)
        except CallFailed as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_a_status_within_3_s_and_comes_back(role: str) -> None:
    with running_stack("--dtype", "fp32") as stack:
        before = stack.account[role][0]["pid"]
        outcomes = asyncio.run(streams_through_a_death(stack, role))
        assert outcomes, "nobody got a status"
        for code, got_tokens, seconds in outcomes:
            assert code is (grpc.StatusCode.ABORTED if got_tokens else grpc.StatusCode.UNAVAILABLE)
            assert seconds < 3
        tokens = asyncio.run(answer_after_restart(stack.address))
        assert tokens == reference.greedy(reference.prompts()[20], 16)
        assert stack.account[role][0]["pid"] != before
        stack.wait_idle()


def test_a_killed_prefill_worker_leaves_no_block_behind() -> None:
    """The decode worker survives it: what was granted to the dead writer is free again."""
    with running_stack("--dtype", "fp32") as stack:
        asyncio.run(streams_through_a_death(stack, "prefill"))
        stack.wait_idle(timeout_s=60)  # the prefill worker has to come back first
