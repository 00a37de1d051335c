"""In fp32, greedy output through the whole stack is transformers' own, token for token.

The small form runs three stacks that between them cover both transports, three chunk sizes, cold and
cached prefixes, and one or sixteen requests at a time; the full form runs every combination.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from diptych.client import AsyncClient, chat
from tests.end_to_end import reference
from tests.end_to_end.asking import greedy_tokens, many_greedy
from tests.end_to_end.stack import running_stack

MAX_TOKENS = 16
pytestmark = pytest.mark.timeout(900)  # transformers takes a minute or two for its side, once


def differing(prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, ...]]) -> list[int]:
    """Lengths of the prompts whose answer is not transformers'."""
    return [
        len(prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer != reference.greedy(tuple(prompt), MAX_TOKENS)
    ]


def check_identity(transport: str, chunk: int) -> None:
    prompts = reference.prompts()
    assert len(prompts) >= 30
    with running_stack("--dtype", "fp32", "--transport", transport, "--prefill-chunk", str(chunk)) as stack:
        together = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=16))
        cached_before = stack.metric("decode", "diptych_prefix_cache_hits_total")
        again = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=1))
        cached = stack.metric("decode", "diptych_prefix_cache_hits_total") - cached_before
        moved = stack.metric("decode", "diptych_kv_transfer_bytes_total")
        stack.wait_idle()
    assert differing(prompts, together) == []
    assert differing(prompts, again) == []
    assert cached > sum(map(len, prompts)) / 2, "the second pass should have found most of its prefixes"
    assert (moved == 0) == (transport == "shared_memory")


@pytest.mark.parametrize(("transport", "chunk"), [("shared_memory", 512), ("shared_memory", 16), ("tcp", 64)])
def test_the_stack_equals_transformers(transport: str, chunk: int) -> None:
    check_identity(transport, chunk)


@pytest.mark.full
@pytest.mark.parametrize(
    ("transport", "chunk"), [("shared_memory", 64), ("tcp", 16), ("tcp", 512), ("gloo", 16)]
)
def test_the_stack_equals_transformers_full(transport: str, chunk: int) -> None:
    check_identity(transport, chunk)


def test_a_few_prompts_over_a_world_of_two_equal_transformers() -> None:
    """The driver of NCCL, over Gloo: prompts of one block, of several chunks, and one seen before."""
    prompts = [prompt for prompt in reference.prompts() if len(prompt) <= 600][::4]
    prompts.append(prompts[-1])
    with running_stack("--dtype", "fp32", "--transport", "gloo", "--prefill-chunk", "64") as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=4))
        moved = stack.metric("decode", "diptych_kv_transfer_bytes_total")
        stack.wait_idle()
    assert differing(prompts, answers) == []
    assert moved > 0


def test_chats_equal_transformers_and_answer_the_question() -> None:
    async def ask(address: str) -> list[tuple[int, ...]]:
        async with AsyncClient(address) as client:
            return [
                await greedy_tokens(client, chat(question), MAX_TOKENS) for question in reference.QUESTIONS
            ]

    with running_stack("--dtype", "fp32") as stack:
        answers = asyncio.run(ask(stack.address))
    assert answers == [reference.greedy(reference.chat_ids(q), MAX_TOKENS) for q in reference.QUESTIONS]
    assert "Paris" in reference.tokenizer().decode(answers[0], skip_special=True)


@pytest.mark.parametrize("failpoint", ["handover.swap_blocks", "handover.drop_block"])
def test_one_block_swapped_or_dropped_is_noticed(failpoint: str) -> None:
    """The control: the comparison above is worth something because it fails here."""
    prompts = [prompt for prompt in reference.prompts() if 48 <= len(prompt) <= 600]
    with running_stack("--dtype", "fp32", env={"DIPTYCH_FAILPOINTS": failpoint}) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=4))
    assert len(differing(prompts, answers)) > len(prompts) / 2
