"""The whole service with both workers on one GPU says what transformers says."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import running_stack

TOKENS = reference.MOST_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_text_through_the_whole_stack_is_that_of_transformers(transport: str) -> None:
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "1024", "--transport", transport)
    prompts = reference.prompts()[:30:3]
    with running_stack(*flags) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4))
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, TOKENS) for prompt in prompts]
