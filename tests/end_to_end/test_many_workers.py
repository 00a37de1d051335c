"""Two prefill and two decode workers: all take part, any pair can hand over, the text stays right."""

from __future__ import annotations

import asyncio

from tests.end_to_end import reference
from tests.end_to_end.asking import many_greedy
from tests.end_to_end.stack import running_stack

MAX_TOKENS = 16


def test_two_by_two_workers_share_the_load_and_agree() -> None:
    prompts = [prompt for prompt in reference.prompts() if len(prompt) <= 520]
    with running_stack("--dtype", "fp32", "--prefill-workers", "2", "--decode-workers", "2") as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=12))
        served = {
            (role, index): stack.metric(role, "diptych_engine_step_tokens_total", index)
            for role in ("prefill", "decode")
            for index in (0, 1)
        }
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    assert all(served.values()), f"somebody had nothing to do: {served}"
