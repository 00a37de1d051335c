"""Greedy generation of the bundled model equals transformers' generate, token for token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool, OutOfBlocks
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.forms import sampled

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {
    "chat": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "plain": "Once upon a time, in a village by the sea,",
    "code": "def fibonacci(n):\n    ",
    "one token": "The",
}


@pytest.fixture(scope="session")
def oracle_tokens(oracle: Any) -> Callable[[tuple[int, ...]], list[int]]:
    """transformers' greedy continuation of a prompt, computed once for both backends."""

    @cache
    def continuation(ids: tuple[int, ...]) -> list[int]:
        with torch.no_grad():
            whole = oracle.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=2,
                eos_token_id=2,
            )
        tokens: list[int] = whole[0, len(ids) :].tolist()
        return tokens

    return continuation


@pytest.mark.parametrize("name", sampled(PROMPTS, ["chat"]))
def test_tokens_equal_transformers(
    name: str,
    bundled_model: Model,
    oracle_tokens: Callable[[tuple[int, ...]], list[int]],
    bundled_tokenizer: Any,
) -> None:
    ids = bundled_tokenizer(PROMPTS[name], add_special_tokens=False)["input_ids"]
    expected = oracle_tokens(tuple(ids))
    runner, pool = Runner(bundled_model, threads=1), BlockPool(16)
    memory = KVMemory(bundled_model.kv_layout(16), 16)
    for chunk in (5, 512):
        got = generate(
            runner,
            memory,
            pool,
            ids,
            GREEDY,
            max_tokens=MAX_TOKENS,
            stop_ids=(bundled_tokenizer.eos_token_id,),
            chunk=chunk,
        )
        assert got == expected
        assert pool.available() == pool.total
    if name == "chat":
        assert "Paris" in bundled_tokenizer.decode(got)


def test_min_tokens_holds_stop_tokens_back(bundled_model: Model) -> None:
    runner, pool = Runner(bundled_model, threads=1), BlockPool(16)
    memory = KVMemory(bundled_model.kv_layout(16), 16)

    def run(min_tokens: int, stop: int) -> list[int]:
        return generate(
            runner, memory, pool, [1, 4093], GREEDY, max_tokens=6, stop_ids=[stop], min_tokens=min_tokens
        )

    stop = run(0, 49151)[0]
    assert run(0, stop) == [stop]
    held = run(3, stop)
    assert stop not in held[:3]


def test_sampled_text_depends_on_the_seed_alone(bundled_model: Model) -> None:
    runner, pool = Runner(bundled_model, threads=1), BlockPool(16)
    memory = KVMemory(bundled_model.kv_layout(16), 16)

    def run(seed: int, chunk: int) -> list[int]:
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
        return generate(runner, memory, pool, [504, 3080, 253], params, max_tokens=8, chunk=chunk)

    assert run(1, 512) == run(1, 2) != run(2, 512)
    with pytest.raises(OutOfBlocks):
        generate(runner, memory, pool, [5] * 300, GREEDY, max_tokens=8)
    assert pool.available() == pool.total
