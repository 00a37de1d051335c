"""Asking a running system, one prompt or many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from diptych.client import AsyncClient, Chunk
from tests.end_to_end.reference import without_end

Prompt = Sequence[int] | str | list[dict[str, str]]

SHORT_OUTPUTS = 64  # so many, and little is left of what was known before


async def greedy_tokens(client: AsyncClient, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
    """The streamed token ids of a greedy request, end-of-sequence excluded."""
    chunks = await collect(client, prompt, max_tokens=max_tokens, temperature=0.0)
    return without_end([token for chunk in chunks for token in chunk.token_ids])


async def greedy_answer(address: str, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
    """The same through a connection of its own."""
    async with AsyncClient(address) as client:
        return await greedy_tokens(client, prompt, max_tokens)


async def collect(client: AsyncClient, prompt: Prompt, **options: object) -> list[Chunk]:
    """All messages of a stream."""
    async with aclosing(client.stream(prompt, timeout_s=120, **options)) as stream:  # type: ignore[arg-type]
        return [chunk async for chunk in stream]


async def many_greedy(
    address: str, prompts: Sequence[Prompt], max_tokens: int, *, at_a_time: int
) -> list[tuple[int, ...]]:
    """Greedy answers to all prompts, `at_a_time` of them in flight."""
    gate = asyncio.Semaphore(at_a_time)
    async with AsyncClient(address) as client:

        async def one(prompt: Prompt) -> tuple[int, ...]:
            async with gate:
                return await greedy_tokens(client, prompt, max_tokens)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def teach_short_outputs(address: str) -> None:
    """The gateway lets in what will fit to its end, as it knows outputs. After these it lets in too much."""
    asyncio.run(many_greedy(address, SHORT_OUTPUTS * [[5, 6, 7]], 1, at_a_time=8))
