"""Keys and values in int8 through the whole system: the tokens of the engine alone with such a cache."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch

from diptych.client import AsyncClient, Chunk
from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.end_to_end import reference
from tests.end_to_end.http_requests import collect
from tests.end_to_end.stack import running_stack

MAX_TOKENS = 24
PROMPTS = (5, 12, 21, 25)  # by index: short, block borders, several chunks

pytestmark = [
    pytest.mark.full,  # tests/diptych/worker_process/test_int8_kv.py has both workers in one process
    pytest.mark.timeout(600),
]


@functools.cache
def alone() -> list[list[int]]:
    """Return what the engine says in one process, with other chunks than the workers'."""
    model = load_model(reference.model_file(), torch.float32, backend="native", kv_cache="int8")
    memory, pool = KVMemory(model.kv_layout(16), 64), BlockPool(64)
    return [
        generate(
            Runner(model, 1),
            memory,
            pool,
            list(reference.prompts()[index]),
            SamplingParams(temperature=0.0),
            max_tokens=MAX_TOKENS,
            stop_ids=reference.tokenizer().eos_token_ids,
            chunk=23,
        )
        for index in PROMPTS
    ]


async def answers(address: str) -> list[list[Chunk]]:
    """Return the chunks of all prompts, asked at once."""
    async with AsyncClient(address) as client:
        options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "cache_salt": "int8"}
        asked = (collect(client, reference.prompts()[index], **options) for index in PROMPTS)
        return await asyncio.gather(*asked)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_answers_cold_and_from_the_cache_are_the_engines(transport: str) -> None:
    flags = ("--dtype", "fp32", "--kv-cache-dtype", "int8", "--transport", transport)
    cached = []
    with running_stack(*flags) as stack:
        for _ in range(2):
            found = asyncio.run(answers(stack.address))
            assert [[token for chunk in one for token in chunk.token_ids] for one in found] == alone()
            cached.append(sum(one[-1].usage.cached_prompt_tokens for one in found if one[-1].usage))
    assert cached[1] > cached[0]
