"""Checks of both workers of a model whose layers have blocks of their own: of a window, or pages of states.

Each is called with the workers of such a model and with its shape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.models.shape import ModelShape
from diptych.runtime.block_hash import block_keys
from diptych.runtime.discovery.prefix_index import PrefixIndex, PrefixSnapshot
from diptych.runtime.discovery.records import Identity
from diptych.worker_process.attempt import Attempt
from tests.diptych.worker_process.both_workers import BLOCK, VOCABULARY, House, greedy, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.diptych.worker_process.test_random_interleavings import Plan, Walk

PROMPT = tuple((7 * n + 3) % VOCABULARY for n in range(42))
ANSWER = 14
BLOCKS = 120
SYSTEM = PROMPT[:30]
"""Begin of all prompts that `asking` gives, longer than a window."""
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "tcp"])


def answer_of(shape: ModelShape, prompt: Sequence[int], count: int = ANSWER) -> list[int]:
    return list(greedy(tuple(prompt), count, shape=shape))


def asking(number: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt that begins as others do and ends with `tokens` tokens of its own."""
    return (*SYSTEM, *((number * n + 5) % VOCABULARY for n in range(tokens)))


async def ask(made: House, name: str, prompt: Sequence[int], count: int = ANSWER, **changes: Any) -> Heard:
    """Send a request and wait for its end."""
    gateway = Gateway(made)
    message = work((name, 1), tuple(prompt), count, **changes)
    if message.local_prefill:
        heard = gateway.start_local(made.decodes[0], message)
    else:
        heard = gateway.start(made.decodes[0], made.prefills[0], message)
    async with asyncio.timeout(30):
        await heard.ended.wait()
    await asyncio.sleep(0)
    return heard


def is_wrong(shape: ModelShape, heard: Heard, prompt: Sequence[int]) -> bool:
    """Return whether a request failed, or got other tokens than the model's."""
    return heard.terminal_messages != ["decode finished"] or heard.tokens != answer_of(shape, prompt)


def expected_hit(made: House, prompt: Sequence[int]) -> int:
    """Return the cached tokens that a gateway expects of the decode worker, by the keys of its pool."""
    index, life, layout = PrefixIndex(), Identity(1, 1), made.decodes[0].memory.layout
    index.load(PrefixSnapshot("decode", life, 1, made.decodes[0].pool.cached_keys()))
    assert layout.windows is not None
    attempt = Attempt.from_work(work(("hit", 1), tuple(prompt), 1), max_context=256)
    keys = block_keys(attempt.cache_namespace, prompt, BLOCK)[: (len(prompt) - 1) // BLOCK]
    return index.usable_hits("decode", life, keys, layout.windows.kept(BLOCK) - 1) * BLOCK


def cached_tokens(made: House) -> int:
    """Return the cached tokens that the last request to end had."""
    return made.decodes[0].ended[-1].times.cached_tokens


def drop_pages(pool: BlockPool) -> int:
    """Evict a pool's windowed blocks or pages, as others that need room may; return how many there were."""
    keys = list(pool._unlisted)  # below them are the marks of their places
    return sum(pool._uncache(pool._cache.discard(key)) for key in keys)


async def check_chat(made: House, shape: ModelShape, transport: str) -> None:
    """Go on from the end of an answer, which is a hit, as the end of a prompt is, and its middle is not."""
    first = await ask(made, "a", PROMPT)
    assert first.tokens == answer_of(shape, PROMPT)
    turn = (*PROMPT, *first.tokens, 5, 6, 7)
    assert (await ask(made, "b", turn)).tokens == answer_of(shape, turn)
    # Where blocks are copied the prefill worker has the first prompt of its own, and not the answer.
    end = len(PROMPT) if transport == "tcp" else len(PROMPT) + ANSWER - 1
    assert cached_tokens(made) == end // BLOCK * BLOCK
    hit = expected_hit(made, turn)
    assert (await ask(made, "c", turn)).tokens == answer_of(shape, turn)
    assert cached_tokens(made) == hit == (len(turn) - 1) // BLOCK * BLOCK
    assert expected_hit(made, turn[:20]) == 0
    assert (await ask(made, "d", turn[:20])).tokens == answer_of(shape, turn[:20])
    assert cached_tokens(made) == 0, "nothing was kept in the middle of a prompt"
    assert await made.empty() == []


async def check_third_prompt(made: House, shape: ModelShape, tokens: int) -> None:
    """Ask with prompts of one begin: what the first two share is a hit for those after them."""
    hits = []
    for number in (11, 13, 17, 19):
        heard = await ask(made, f"r{number}", asking(number, tokens))
        assert heard.tokens == answer_of(shape, asking(number, tokens))
        hits.append(cached_tokens(made))
    assert hits == [0, 0, *[len(SYSTEM) // BLOCK * BLOCK] * 2]
    assert await made.empty() == []


async def check_third_prompt_misses(made: House) -> None:
    """Ask with prompts of one begin, of which nothing may be found: the control of the check above."""
    for number in (11, 13, 17):
        await ask(made, f"r{number}", asking(number, 50))
    assert cached_tokens(made) == 0


async def check_lost_hit(made: House, shape: ModelShape) -> None:
    """Ask once more after the windowed blocks or pages of a prompt are gone: it is no hit then."""
    await ask(made, "a", PROMPT)
    assert expected_hit(made, PROMPT) == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert drop_pages(made.decodes[0].pool) > 0
    drop_pages(made.prefills[0].scratch)
    assert made.decodes[0].pool.cached() > 0
    assert expected_hit(made, PROMPT) == 0, "gateways expect what is granted"
    assert (await ask(made, "b", PROMPT)).tokens == answer_of(shape, PROMPT)
    assert cached_tokens(made) == 0


async def check_lost_hit_shows(made: House, shape: ModelShape) -> None:
    """Ask likewise where such a hit is taken: the control of the check above."""
    await ask(made, "a", PROMPT)
    drop_pages(made.decodes[0].pool)
    assert is_wrong(shape, await ask(made, "b", PROMPT), PROMPT)


class PageWalk(Walk):
    """A walk over workers of such a model."""

    requests = 90

    def __init__(self, made: House, seed: int, shape: ModelShape) -> None:
        super().__init__(made, seed)
        self._shape = shape

    def expected(self, planned: Plan) -> tuple[int, ...]:
        return greedy(planned.prompt, planned.max_tokens, shape=self._shape)


async def check_random_order(
    transport: str,
    shape: ModelShape,
    seed: int,
    blocks: int,
    caplog: pytest.LogCaptureFixture,
    backend: str = "torch",
) -> None:
    """Walk over two workers of each kind: requests leave nothing behind, and some are preempted."""
    caplog.set_level(logging.ERROR)
    async with house(
        transport, decodes=2, prefills=2, blocks=blocks, scratch=90, shape=shape, backend=backend
    ) as made:
        walk = PageWalk(made, seed, shape)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
