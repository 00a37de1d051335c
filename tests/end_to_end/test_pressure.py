"""Far too little KV memory: requests wait, are preempted and come back, and every answer is right."""

from __future__ import annotations

import asyncio

from tests.end_to_end import reference
from tests.end_to_end.asking import many_greedy
from tests.end_to_end.stack import running_stack

STREAMS = 64
MAX_TOKENS = 24
KV_BLOCKS = 24  # 384 tokens, where the streams together need more than 6,000


def test_64_streams_in_a_pool_far_too_small_all_finish_with_the_right_text() -> None:
    by_length = [prompt for prompt in reference.prompts() if len(prompt) <= 260]
    prompts = [by_length[n % len(by_length)] for n in range(STREAMS)]
    assert sum(len(prompt) + MAX_TOKENS for prompt in prompts) > 10 * KV_BLOCKS * 16
    with running_stack("--dtype", "fp32", "--kv-blocks", str(KV_BLOCKS)) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=STREAMS))
        preempted = stack.metric("decode", "diptych_preemptions_total")
        stack.wait_idle()
    wrong = [
        (n, len(prompt))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if answer != reference.greedy(tuple(prompt), MAX_TOKENS)
    ]
    assert wrong == []
    assert preempted > 0, "nobody was preempted: the pool was not too small after all"
