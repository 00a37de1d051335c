"""Workers with different drafters: drafts are lost, and neither a token nor a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from diptych.engine.kv.kv_memory import SEGMENT_BYTES, KVLayout, KVMemory
from tests.diptych.worker_process.both_workers import greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.forms import sampled

PROMPT = (5, 9, 2, 33, 7, 18, 4, 40, 22, 1, 13)
COUNT = 30
TRANSPORTS = ("shared_memory", "tcp")
DRAFTED, UNDRAFTED = b"d" * 32, b"u" * 32
"""Keys of hash chains, as a gateway gives them to pairs with one drafter and to others."""


async def answered(
    gateway: Gateway, prompt: Sequence[int], *, by: int = 0, to: int = 0, chain: bytes = UNDRAFTED
) -> tuple[int, ...]:
    """Return the output of decode worker `to` after prefill worker `by`."""
    message = work((f"r{len(gateway.heard)}", 1), tuple(prompt), COUNT)
    message.cache_namespace = chain
    heard = gateway.start(gateway.house.decodes[to], gateway.house.prefills[by], message)
    await heard.ended.wait()
    return tuple(heard.tokens)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("decode", "prefill"),
    sampled(
        [("first", None), (None, "random"), ("first", "random"), ("random", "first")],
        [("first", None), (None, "random"), ("random", "first")],
    ),
)
async def test_the_models_own_keys_and_values_are_handed_over(
    transport: str, decode: str | None, prefill: str | None, backend: str
) -> None:
    """Two turns: blocks of another size are computed in place, pushed, cached and pulled."""
    many = house(
        transport,
        drafts=([decode], [prefill]),
        backend=backend,
        blocks=60,
        scratch=60,
        pull_mode="always",
    )
    async with many as made:
        gateway = Gateway(made)
        first = await answered(gateway, PROMPT)
        assert first == greedy(PROMPT, COUNT)
        longer = (*PROMPT, *first, 17, 3)
        assert await answered(gateway, longer) == greedy(longer, COUNT)
        ended = made.decodes[0].ended
        assert ended[1].times.cached_tokens > len(PROMPT)
        assert [request.drafted for request in ended] == [0, 0]
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_prefill_worker_serves_decode_workers_of_every_drafter(transport: str) -> None:
    """Steps are of blocks of one size at a time, and all prompts come at once."""
    drafts = ([None, "first", "same"], ["first"])
    many = house(transport, decodes=3, drafts=drafts, backend="native", blocks=90, scratch=200, chunk=32)
    async with many as made:
        gateway = Gateway(made)
        prompts = [(*PROMPT, number) for number in range(12)]
        chains = (UNDRAFTED, DRAFTED, UNDRAFTED)
        asked = [
            answered(gateway, prompt, to=number % 3, chain=chains[number % 3])
            for number, prompt in enumerate(prompts)
        ]
        assert await asyncio.gather(*asked) == [greedy(prompt, COUNT) for prompt in prompts]
        drafted = [sum(request.drafted for request in one.ended) for one in made.decodes]
        assert drafted[0] == drafted[2] == 0 < drafted[1]
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("chained", [True, False], ids=["chains", "control"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_no_draft_reads_a_segment_that_was_left_out(transport: str, chained: bool) -> None:
    """The model drafts for itself: all drafts are right where all of its keys and values are there.

    Control: with blocks of both kinds in one chain of keys some are wrong, and no token is.
    """
    drafts = (["same"], ["same", None])
    async with house(transport, prefills=2, drafts=drafts, backend="native", blocks=90, scratch=90) as made:
        gateway = Gateway(made)
        long = (*PROMPT, *greedy(PROMPT, 2 * COUNT))
        other = UNDRAFTED if chained else DRAFTED
        assert await answered(gateway, long, by=1, chain=other) == greedy(long, COUNT)
        assert await answered(gateway, long, by=0, chain=DRAFTED) == greedy(long, COUNT)
        ended = made.decodes[0].ended
        assert ended[0].drafted == 0 < ended[1].drafted
        assert (ended[1].accepted == ended[1].drafted) == chained
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_control_a_segment_in_the_wrong_place_is_noticed(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the exactness above: blocks of the writer's own size, or bytes that begin too late."""

    def late(self: KVMemory) -> KVMemory:
        if self.draft is None:
            return self
        own = KVMemory.__new__(KVMemory)
        own._bytes, own.draft = None, None
        laid = replace(self.layout, draft=None)
        own._lay_segment(laid, self.blocks[:, SEGMENT_BYTES : SEGMENT_BYTES + laid.own_bytes], 0)
        return own

    monkeypatch.setattr(KVLayout, "in_blocks_of", lambda self, size: replace(self, draft=None))
    monkeypatch.setattr(KVMemory, "without_draft", late)
    async with house(transport, drafts=(["first"], [None]), backend="native", blocks=60) as made:
        gateway = Gateway(made)
        assert await answered(gateway, PROMPT) != greedy(PROMPT, COUNT)
        await gateway.close()
