"""The tier in page-locked memory on a GPU: blocks come back whole, beside the steps, and in the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.tiers.pinned import PinnedSlots
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack
from diptych.worker_process.device_copies import copies_of, page_lock
from diptych.worker_process.kv_tiers import KvTiers
from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import running_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LAYOUT = KVLayout(8, 8, 128, 16, torch.bfloat16)
BLOCKS = 24
KEYS = [number.to_bytes(16, "big") for number in range(1, 80)]
BUSY_CYCLES = 2_000_000_000
"""About a second of a GPU."""


class Card:
    """A pool of a GPU with a tier in page-locked memory."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        form = EntryFormat(b"f" * 16, LAYOUT.bytes_per_block)
        lock = page_lock(device)
        assert lock is not None
        self.slots = PinnedSlots(64 * (form.entry_bytes + 64), form.entry_bytes, lock)
        self.memory, self.pool = KVMemory.on_device(LAYOUT, BLOCKS, device), BlockPool(BLOCKS)
        self.stack = TierStack([RamTier(self.slots.entries * form.entry_bytes, slots=self.slots)], form)
        self.tiers = KvTiers(
            self.memory,
            self.pool,
            self.stack,
            changed=lambda: None,
            moved=lambda tiered, gone: None,
            copies=copies_of(self.memory, self.slots),
        )

    def compute(self, keys: Sequence[bytes]) -> None:
        """Write the first byte of each key into its block, as a step does, and publish the blocks."""
        blocks = self.pool.allocate(len(keys))
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self.memory.blocks[block].fill_(key[-1])
            self.pool.insert(block, key, keys[place - 1] if place else b"")
        self.tiers.entered(self.pool.drain_events()[0])
        self.pool.release(blocks)

    async def load(self, keys: Sequence[bytes]) -> Loaded:
        done: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        assert self.tiers.load(keys, done.set_result)
        return await done

    async def stored(self, keys: Sequence[bytes]) -> None:
        async with asyncio.timeout(60):
            while not all(key in self.stack for key in keys):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_blocks_come_back_from_page_locked_memory() -> None:
    card = Card()
    slot = card.slots.take()
    assert slot is not None
    assert torch.frombuffer(slot.payload, dtype=torch.uint8).is_pinned()
    del slot
    card.compute(KEYS[:16])
    await card.stored(KEYS[:16])
    card.compute(KEYS[40:64])
    await card.stored(KEYS[40:64])
    loaded = await card.load(KEYS[:16])
    assert loaded.blocks.total() == 16
    blocks = card.pool.acquire_prefix(KEYS[:16])
    assert [set(card.memory.blocks[block].unique().tolist()) for block in blocks] == [
        {key[-1]} for key in KEYS[:16]
    ]
    card.pool.release(blocks)
    await asyncio.to_thread(card.tiers.close)


@pytest.mark.asyncio
async def test_event_loop_and_steps_go_on_while_blocks_are_copied() -> None:
    card = Card()
    card.compute(KEYS[:16])
    await card.stored(KEYS[:16])
    card.compute(KEYS[40:64])
    await card.stored(KEYS[40:64])
    torch.cuda._sleep(BUSY_CYCLES)
    loading = asyncio.ensure_future(card.load(KEYS[:16]))
    await asyncio.sleep(0.05)
    step = torch.cuda.Event()
    torch.zeros(1, device="cuda").add_(1)
    step.record()
    ticks = 0
    while not loading.done():
        ticks += 1
        await asyncio.sleep(0.001)
    assert ticks > 20, "the loop waited for the card"
    assert (await loading).blocks.total() >= 8
    step.synchronize()
    await asyncio.to_thread(card.tiers.close)


def test_text_with_a_tier_in_page_locked_memory_is_that_of_transformers() -> None:
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-blocks", "64", "--kv-tier", "ram:256m")
    prompts = [prompt for prompt in reference.prompts()[:30] if len(prompt) >= 33][:12]
    expected = [reference.greedy(prompt, reference.MOST_TOKENS) for prompt in prompts]
    with running_stack(*flags) as stack:
        for _ in range(2):  # the second time most of the prompts have left the pool
            answers = asyncio.run(many_greedy(stack.address, prompts, reference.MOST_TOKENS, at_a_time=2))
            assert answers == expected
            stack.wait_idle()
            time.sleep(1.0)  # for what is stored
