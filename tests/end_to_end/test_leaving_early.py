"""Clients that go away at any moment: nothing leaks, nobody hangs, the next request works."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from diptych.client import AsyncClient
from tests.end_to_end import reference
from tests.end_to_end.http_requests import greedy_answer
from tests.end_to_end.stack import Stack, running_stack
from tests.forms import sampled

ANSWER_S = 1.5  # of 64 tokens, on the machine that the patience below is from
SLOWEST = 4.0  # patience does not grow beyond this: the test has to end


async def slowness(address: str) -> float:
    """How many times as long an answer takes here, from 1 to SLOWEST."""
    began = time.monotonic()
    await greedy_answer(address, reference.prompts()[10], 64)
    return min(max((time.monotonic() - began) / ANSWER_S, 1.0), SLOWEST)


async def cancel_at_random(address: str, count: int, seed: int) -> dict[str, int]:
    """Start streams, leave each after a random time; how far they had come."""
    slow = await slowness(address)
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
            (rng.choice(prompts if n % 10 == 0 else short), slow * rng.expovariate(20 if n % 2 else 1.5))
            for n in range(count)
        ]
        await asyncio.gather(*(one(prompt, after) for prompt, after in plans))
    return came


def check_cancels(stack: Stack, count: int) -> None:
    came = asyncio.run(cancel_at_random(stack.address, count, seed=7))
    stack.wait_idle()
    tokens = asyncio.run(greedy_answer(stack.address, reference.prompts()[21], 16))
    assert came["nothing"] > count // 25, f"too few cancels before the first token: {came}"
    assert came["tokens"] > count // 25, f"too few cancels after the first token: {came}"
    assert reference.is_greedy(reference.prompts()[21], tokens, 16)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stack", "count"),
    sampled([("bundled", 75), ("bundled", 150), ("bundled_tcp", 150)], [("bundled", 75)]),
)
def test_cancels_at_random_instants_leak_nothing(
    request: pytest.FixtureRequest, stack: str, count: int
) -> None:
    check_cancels(request.getfixturevalue(stack), count)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "gloo"])
def test_500_cancels_at_random_instants_leak_nothing(transport: str) -> None:
    with running_stack("--dtype", "fp32", "--transport", transport, "--kv-blocks", "600") as stack:
        check_cancels(stack, 500)
