"""Disaggregated equals aggregated, also when tokens are drawn: the same seed gives the same text.

The reference is the same engine in this process, alone, with other chunks than the stack's. Draws depend on
(seed, index) only, and the native backend computes a row the same way whatever its neighbours, so that the
two may be compared token for token even far from greedy.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

import pytest
import torch

from diptych.client import AsyncClient
from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.end_to_end import reference
from tests.end_to_end.http_requests import collect

MAX_TOKENS = 32
PROMPTS = (5, 12, 21, 25)  # by index: short, block borders, several chunks
OFF = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
KNOBS: tuple[Mapping[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6},
)


@functools.cache
def aggregated() -> list[list[int]]:
    """What the engine says in one process."""
    model = load_model(reference.model_file(), torch.float32, backend="native")
    runner = Runner(model, 1)
    memory = KVMemory(model.kv_layout(16), 64)
    pool = BlockPool(64)
    return [
        generate(
            runner,
            memory,
            pool,
            list(reference.prompts()[index]),
            SamplingParams(**{**OFF, **knobs}, seed=1000 + index),  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
            stop_ids=reference.tokenizer().eos_token_ids,
            chunk=23,
        )
        for index, knobs in zip(PROMPTS, KNOBS, strict=True)
    ]


async def disaggregated(address: str) -> list[list[int]]:
    """The same requests through the stack, all at once."""
    async with AsyncClient(address) as client:

        async def one(index: int, knobs: Mapping[str, float]) -> list[int]:
            options = {**knobs, "seed": 1000 + index, "max_tokens": MAX_TOKENS}
            chunks = await collect(client, reference.prompts()[index], **options)
            return [token for chunk in chunks for token in chunk.token_ids]

        return await asyncio.gather(*(one(i, knobs) for i, knobs in zip(PROMPTS, KNOBS, strict=True)))


@pytest.mark.parametrize("stack", [pytest.param("bundled", marks=pytest.mark.full), "bundled_tcp"])
def test_seeded_sampling_is_the_same_text_in_one_process_and_in_three(
    request: pytest.FixtureRequest, stack: str
) -> None:
    answers = asyncio.run(disaggregated(request.getfixturevalue(stack).address))
    assert answers == aggregated()
    assert len({tuple(answer[:8]) for answer in answers}) == len(answers), "draws should differ"
