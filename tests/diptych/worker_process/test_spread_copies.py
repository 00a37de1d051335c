"""Blocks whose shares ranks hold, between their pool and its tiers: whole ones alone are stored and cached.

The ranks are threads with real connections, and the program's own service of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.block_copies import BlockCopies
from diptych.worker_process.device_copies import copies_of
from diptych.worker_process.group.spread_blocks import SpreadShares
from diptych.worker_process.spread_copies import SpreadCopies
from kvtransfer.transports.host_blocks import read_block, write_block
from tests.diptych.worker_process.test_kv_tiers import BLOCKS, KEYS, LAYOUT, House, content, stored, until
from tests.kvtransfer.thread_ranks import ThreadRank

pytestmark = pytest.mark.asyncio
ENTRY = EntryFormat(b"f" * 16, LAYOUT.bytes_per_block).entry_bytes
OWN, OTHER = (KVShare(range(layer, layer + 1), range(1)) for layer in range(2))
"""Two stages of a layer each; rank 0 has the first."""


class Group(House):
    """A pool of two ranks with memories of their own, with tiers; the other rank may be in a step."""

    def __init__(self, folder: Path) -> None:
        self.rank: ThreadRank
        self.in_step = False
        self.tasks: list[asyncio.Task[None]] = []
        super().__init__([RamTier(8 * ENTRY), DiskTier(folder, 30 * ENTRY, b"f" * 16)], copies=self.spread)
        self.tasks.append(asyncio.create_task(self.steps()))

    def spread(self, memory: KVMemory) -> BlockCopies | None:
        self.rank = ThreadRank(OTHER, LAYOUT, BLOCKS, in_step=True)
        memory.spread = SpreadShares(memory, 0, [OWN], [(self.rank.rank, OTHER)])
        return copies_of(memory, None)

    async def steps(self) -> None:
        """Have the rank carry out what is ordered, but in a step."""
        while True:
            await asyncio.sleep(0.001)
            if not self.in_step and self.rank._theirs["plans"].poll():
                self.rank.carry_out_next()

    def fill(self, block: int, key: bytes) -> None:
        write_block(self.memory, block, memoryview(bytearray(content(key))))

    def compute(self, keys: Sequence[bytes], held: Sequence[int] = ()) -> None:
        blocks = self.pool.acquire_prefix(keys)
        fresh = self.pool.allocate(len(keys) - len(blocks))
        for key, block in zip(keys[len(blocks) :], fresh, strict=True):
            self.fill(block, key)
        blocks += fresh
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self.pool.insert(block, key, keys[place - 1] if place else b"")
        self.tiers.entered(self.pool.drain_events()[0])
        self.pool.release(blocks)

    async def whole(self, keys: Sequence[bytes]) -> int:
        """Check the shares of every cached block, of both ranks; return how many lead."""
        blocks = self.pool.acquire_prefix(keys)
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(await asyncio.to_thread(read_block, self.memory, block)) == content(key)
        self.pool.release(blocks)
        return len(blocks)


@pytest_asyncio.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    made = Group(tmp_path)
    yield made
    made.in_step = False
    await asyncio.to_thread(made.tiers.close)
    await until(lambda: made.pool.available() == BLOCKS)
    made.pool.invariants()
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)
    made.rank.close()


async def test_prefix_that_the_pool_has_lost_comes_back_to_both_ranks(group: Group) -> None:
    await stored(group, KEYS[:6])
    await stored(group, KEYS[20:31])
    assert group.pool.match(KEYS[:6]) < 6
    loaded = await group.load(KEYS[:8])
    assert loaded is not None
    assert loaded.blocks.total() >= 5
    assert await group.whole(KEYS[:6]) == 6


async def test_one_process_finds_what_a_group_stored(group: Group, tmp_path: Path) -> None:
    await stored(group, KEYS[:5])
    alone = House([DiskTier(tmp_path, 30 * ENTRY, b"f" * 16)])
    loaded = await alone.load(KEYS[:5])
    assert loaded is not None
    assert loaded.blocks == {"disk": 5}
    assert alone.check(KEYS[:5]) == 5
    await asyncio.to_thread(alone.tiers.close)


async def test_loaded_block_is_cached_once_every_rank_has_its_share(group: Group) -> None:
    there = await _begin_load_in_a_step(group)
    await asyncio.sleep(0.1)
    assert group.pool.match(KEYS[:6]) == there
    group.in_step = False
    assert await group.tasks[-1] is None
    assert await group.whole(KEYS[:6]) == 6


async def test_loaded_block_is_cached_too_early_where_no_rank_is_waited_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(SpreadShares, "await_writes", lambda self: None)
    await _begin_load_in_a_step(group)
    await until(lambda: group.pool.match(KEYS[:6]) == 6)
    assert (
        bytes(group.rank.memory.block_bytes(group.pool.acquire_prefix(KEYS[:6])[5])) != content(KEYS[5])[:128]
    )
    group.pool.release(group.pool.acquire_prefix(KEYS[:6]) * 2)


async def _begin_load_in_a_step(group: Group) -> int:
    """Begin to load a prefix while the other rank is in a step; return how much of it is cached."""
    await stored(group, KEYS[:6])
    await stored(group, KEYS[20:31])
    there, group.in_step = group.pool.match(KEYS[:6]), True

    async def load() -> None:
        await group.load(KEYS[:6])

    group.tasks.append(asyncio.create_task(load()))
    await until(lambda: group.pool.available() < BLOCKS or group.pool.match(KEYS[:6]) > there)
    return there


@pytest.mark.parametrize("holds", [True, False], ids=["", "control"])
async def test_block_that_a_rank_is_asked_for_is_not_given_out(
    group: Group, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank is in a step: the event loop would wait for that where the block is not held."""
    monkeypatch.setattr(SpreadCopies, "holds", holds)
    waited: list[bytes] = []
    wait: Callable[[bytes, int], None] = lambda key, block: waited.append(key)  # noqa: E731
    group.in_step = True
    group.compute(KEYS[:1])
    await until(lambda: group.tiers._copying == KEYS[0])
    group.pool.on_evicted = wait
    rest = group.pool.allocate(group.pool.available())
    assert len(rest) == BLOCKS - holds
    assert waited == [] if holds else [KEYS[0]]
    group.pool.release(rest)
    group.in_step = False
    await until(lambda: group.tiers._copying is None)
