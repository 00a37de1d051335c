"""In fp32, greedy output through the whole stack is transformers' own, token for token.

The small form asks the two shared stacks, which between them cover both transports and two chunk sizes, with
cold and cached prefixes, one and sixteen requests at a time; the full form runs every combination, and longer
prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from diptych.client import AsyncClient, chat
from tests.end_to_end import reference
from tests.end_to_end.http_requests import greedy_tokens, many_greedy
from tests.end_to_end.stack import Stack, running_stack

MAX_TOKENS = 16
pytestmark = pytest.mark.timeout(900)  # transformers takes a while for its side, once


def differing(prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, ...]]) -> list[int]:
    """Lengths of the prompts whose answer is not transformers'."""
    return [
        len(prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
        if not reference.is_greedy(tuple(prompt), answer, MAX_TOKENS)
    ]


def check_identity(
    stack: Stack, prompts: Sequence[tuple[int, ...]], transport: str, *, full: bool = False
) -> None:
    """Ask for all prompts, many at once, and alone again for some of them, or in the full form all."""
    together = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=16))
    cached_before = stack.metric("decode", "diptych_prefix_cache_hits_total")
    repeated = prompts if full else prompts[::3]
    again = asyncio.run(many_greedy(stack.address, repeated, MAX_TOKENS, at_a_time=1))
    cached = stack.metric("decode", "diptych_prefix_cache_hits_total") - cached_before
    moved = stack.metric("decode", "diptych_kv_transfer_bytes_total")
    stack.wait_idle()
    assert differing(prompts, together) == []
    assert differing(repeated, again) == []
    assert cached > sum(map(len, repeated)) / 2, "the second pass should have found most of its prefixes"
    assert (moved == 0) == (transport == "shared_memory")


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_the_stack_equals_transformers(request: pytest.FixtureRequest, transport: str) -> None:
    stack = request.getfixturevalue("bundled" if transport == "shared_memory" else "bundled_tcp")
    check_identity(stack, reference.short_prompts(), transport)


@pytest.mark.full
@pytest.mark.parametrize(
    ("transport", "chunk"),
    [*itertools.product(["shared_memory", "tcp"], [16, 64, 512]), ("gloo", 16)],
)
def test_the_stack_equals_transformers_full(transport: str, chunk: int) -> None:
    with running_stack("--dtype", "fp32", "--transport", transport, "--prefill-chunk", str(chunk)) as stack:
        check_identity(stack, reference.prompts(), transport, full=True)


def test_a_few_prompts_over_a_world_of_two_equal_transformers() -> None:
    """The driver of NCCL, over Gloo: prompts of one block, of several chunks, and one seen before."""
    prompts = list(reference.short_prompts()[1:11:3])
    prompts.append(prompts[-1])
    with running_stack("--dtype", "fp32", "--transport", "gloo", "--prefill-chunk", "64") as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=4))
        moved = stack.metric("decode", "diptych_kv_transfer_bytes_total")
        stack.wait_idle()
    assert differing(prompts, answers) == []
    assert moved > 0


@pytest.mark.full  # test_features_together.py drafts, too
def test_drafted_tokens_change_nothing() -> None:
    """Alone and beside each other, in steps that leave room for drafts; some drafts have to be right."""
    prompts = [prompt for prompt in reference.short_prompts()[::2] if len(prompt) <= 260]
    with running_stack("--dtype", "fp32", "--set", "decode.speculative-tokens=4") as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=2))
        drafted = stack.metric("decode", "diptych_spec_decode_draft_tokens_total")
        accepted = stack.metric("decode", "diptych_spec_decode_accepted_tokens_total")
    assert differing(prompts, answers) == []
    assert 0 < accepted <= drafted


def test_chats_equal_transformers_and_answer_the_question(bundled: Stack) -> None:
    async def ask(address: str) -> list[tuple[int, ...]]:
        async with AsyncClient(address) as client:
            return [
                await greedy_tokens(client, chat(question), MAX_TOKENS) for question in reference.QUESTIONS
            ]

    answers = asyncio.run(ask(bundled.address))
    assert answers == [reference.greedy(reference.chat_ids(q), MAX_TOKENS) for q in reference.QUESTIONS]
    assert "Paris" in reference.tokenizer().decode(answers[0], skip_special=True)


@pytest.mark.parametrize(
    "failpoint", ["handoff.swap_blocks", pytest.param("handoff.drop_block", marks=pytest.mark.full)]
)
def test_one_block_swapped_or_dropped_is_noticed(failpoint: str) -> None:
    """The control: the comparison above is worth something because it fails here."""
    prompts = [prompt for prompt in reference.short_prompts() if 48 <= len(prompt) <= 260]
    with running_stack("--dtype", "fp32", env={"DIPTYCH_FAILPOINTS": failpoint}) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=4))
    assert len(differing(prompts, answers)) > len(prompts) / 2
