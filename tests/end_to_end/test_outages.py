"""Redis is a hint: without it, requests succeed."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from diptych.client import AsyncClient
from tests.end_to_end import reference
from tests.end_to_end.asking import greedy_tokens
from tests.end_to_end.stack import running_stack

MAX_TOKENS = 8


async def answers(address: str, seconds: float) -> list[tuple[int, ...]]:
    """Greedy answers to short prompts, one after the other, for so long; any error fails the test."""
    prompts = reference.prompts()[:12]
    got = []
    until = time.monotonic() + seconds
    async with AsyncClient(address) as client:
        while time.monotonic() < until:
            got.append(await greedy_tokens(client, prompts[len(got) % len(prompts)], MAX_TOKENS))
    return got


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_succeed_while_redis_is_dead_or_frozen(how: signal.Signals) -> None:
    with running_stack("--dtype", "fp32") as stack:
        valkey = stack.account["valkey"]["pid"]
        os.kill(valkey, how)
        try:
            got = asyncio.run(answers(stack.address, seconds=5))  # longer than the lease of 3 s
        finally:
            if how is signal.SIGSTOP:
                os.kill(valkey, signal.SIGCONT)
        expected = [reference.greedy(reference.prompts()[n % 12], MAX_TOKENS) for n in range(len(got))]
        assert got == expected
        assert len(got) > 10
