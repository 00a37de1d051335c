"""A draft model in real processes: transformers' tokens, over both transports and through a killed worker."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from diptych.client import AsyncClient
from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.test_greedy_identity import MAX_TOKENS, differing

LONG = 48
RUNNING = "diptych_requests_running"
pytestmark = pytest.mark.timeout(900)


@pytest.mark.full  # tests/diptych/worker_process/test_draft_model.py has both workers in one process
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_drafts_change_no_token_nor_does_the_death_of_a_decode_worker(transport: str) -> None:
    """The model drafts for itself: its drafts are right where all of its keys and values have arrived."""
    prompts = [prompt for prompt in reference.short_prompts() if len(prompt) <= 260][:3]
    flags = ("--dtype", "fp32", "--transport", transport, "--decode-workers", "2")
    with running_stack(*flags, "--speculative-model", "bundled", "--speculative-tokens", "3") as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=1))
        assert differing(prompts, answers) == []
        accepted = _total(stack, "accepted")
        assert 0 < accepted <= _total(stack, "draft")
        whole = asyncio.run(_streamed(stack, prompts[0], kill=False))
        cut = asyncio.run(_streamed(stack, prompts[0], kill=True))
    assert cut == whole
    assert whole[:MAX_TOKENS] == reference.greedy(tuple(prompts[0]), MAX_TOKENS)


def _total(stack: Stack, what: str) -> float:
    name = f"diptych_spec_decode_{what}_tokens_total"
    return sum(stack.metric("decode", name, index) for index in range(2))


async def _streamed(stack: Stack, prompt: tuple[int, ...], *, kill: bool) -> tuple[int, ...]:
    """Return the tokens of a stream; with `kill` its decode worker is killed after some of them."""
    tokens: list[int] = []
    async with AsyncClient(stack.address) as client:
        async for chunk in client.stream(prompt, max_tokens=LONG, temperature=0.0, timeout_s=120):
            tokens += chunk.token_ids
            if kill and len(tokens) >= MAX_TOKENS // 2:
                (busy,) = [i for i in range(2) if stack.metric("decode", RUNNING, i)]
                os.kill(stack.account["decode"][busy]["pid"], signal.SIGKILL)
                kill = False
    assert not kill, "the stream was over before its worker could be killed"
    return tuple(tokens)
