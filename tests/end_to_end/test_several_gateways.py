"""Three gateways over two workers: together they admit no more than the workers' memory, Redis or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.second_gateway import second_gateway

STREAMS = 24  # at each gateway
MAX_TOKENS = 16
KV_BLOCKS = 40  # of each worker: some ten of these requests


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(
        *("--dtype", "fp32", "--kv-blocks", str(KV_BLOCKS), "--decode-workers", "2", "--show-secrets")
    ) as made:
        yield made


def preemptions(stack: Stack) -> float:
    return sum(stack.metric("decode", "diptych_preemptions_total", index) for index in (0, 1))


async def crowd(addresses: list[str]) -> None:
    """Send more than fits through all gateways at once, and compare each answer."""
    short = [prompt for prompt in reference.prompts() if len(prompt) <= 48]
    prompts = [short[number % len(short)] for number in range(STREAMS)]
    answers = await asyncio.gather(
        *(many_greedy(address, prompts, MAX_TOKENS, at_a_time=STREAMS) for address in addresses)
    )
    expected = [reference.greedy(tuple(prompt), MAX_TOKENS) for prompt in prompts]
    assert [answer == expected for answer in answers] == [True] * len(addresses)


@pytest.mark.full
def test_three_gateways_preempt_no_request_between_them(stack: Stack) -> None:
    with contextlib.ExitStack() as others:
        addresses = [stack.address]
        addresses += [others.enter_context(second_gateway(stack)).address for _ in range(2)]
        asyncio.run(crowd(addresses[:1]))  # outputs are known to be short, and the quotas are settled
        before = preemptions(stack)
        asyncio.run(crowd(addresses))
        assert preemptions(stack) == before
        os.kill(stack.account["valkey"]["pid"], signal.SIGSTOP)
        try:
            asyncio.run(crowd(addresses))
        finally:
            os.kill(stack.account["valkey"]["pid"], signal.SIGCONT)
        assert preemptions(stack) == before, "each gateway kept within what it held"
        stack.wait_idle()
