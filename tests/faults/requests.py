"""What is asked of a system while parts of it fail: every way of generating, each with one right answer.

The right answer is what the same system says when nothing fails; tests/end_to_end holds that against other
implementations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Any

from diptych.client import AsyncClient, Completion
from tests.end_to_end import tiny_model

TOKENS = 40
TIMEOUT_S = 600.0  # at a load of 30 on two cores a worker takes more than 100 s to start again

Asks = Mapping[str, Mapping[str, Any]]

SAMPLED = {"temperature": 1.0, "seed": 7}
LONG: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
ASKS: Asks = {
    "greedy": {"temperature": 0.0, **LONG},
    "seeded": {**SAMPLED, **LONG},
    "penalties": {
        **SAMPLED,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        **LONG,
    },
    "two choices": {**SAMPLED, "n": 2, **LONG},
    "best of": {**SAMPLED, "n": 1, "best_of": 3, **LONG},
    "beams": {"beam_width": 3, "n": 2, **LONG},
    "logprobs": {**SAMPLED, "logprobs": 2, "prompt_logprobs": 1, **LONG},
    "rules": {**SAMPLED, "allowed_token_ids": list(range(3, 260)), "logit_bias": {40: 2.0}, **LONG},
    "grammar": {**SAMPLED, "regex": r"[a-z]{12}-[0-9]{12}-[a-z]{14}", "max_tokens": 2 * TOKENS},
    "json": {**SAMPLED, "json_schema": '{"type":"array","items":{"type":"integer"},"minItems":30}', **LONG},
}


def prompt_of(name: str, length: int = 100) -> list[int]:
    """One for each question and length: several chunks, and no prefix in common."""
    return tiny_model.prompt(1000 * length + sorted(ASKS).index(name), length)


async def stream(client: AsyncClient, prompt: list[int], options: Mapping[str, Any]) -> Completion:
    """The whole of a stream."""
    async with aclosing(client.stream(prompt, timeout_s=TIMEOUT_S, **options)) as stream:
        async for _ in stream:
            pass
        return stream.received.completion()


def ask(address: str, names: Iterable[str], *, length: int = 100, asks: Asks = ASKS) -> dict[str, Completion]:
    """The streamed answers to these questions of `asks`, all asked at once."""

    async def all_of_them() -> list[Completion]:
        async with AsyncClient(address, retries=0) as client:
            return await asyncio.gather(
                *(stream(client, prompt_of(name, length), asks[name]) for name in names)
            )

    names = list(names)
    return dict(zip(names, asyncio.run(all_of_them()), strict=True))


def check_same(expected: Mapping[str, Completion], got: Mapping[str, Completion]) -> None:
    """Token by token, and in everything else that clients see."""
    for name, answer in got.items():
        for right, choice in zip(expected[name].choices, answer.choices, strict=True):
            assert choice.token_ids == right.token_ids, f"{name}: other tokens"
            assert choice == right, f"{name}: the same tokens, but not the same answer"
        assert answer.prompt is not None
        assert expected[name].prompt is not None
        assert answer.prompt.logprobs == expected[name].prompt.logprobs
        assert answer.usage is not None
        assert expected[name].usage is not None
        assert answer.usage.completion_tokens == expected[name].usage.completion_tokens


def retries(answers: Iterable[Completion]) -> int:
    """How often their attempts were repeated because of a fault."""
    return sum(answer.timings.retries for answer in answers if answer.timings is not None)
