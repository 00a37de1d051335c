"""Blocks between a pool and its tiers: held only while they are copied, never a wrong one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.tiers import disk
from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack
from diptych.worker_process import kv_tiers, tier_loads
from diptych.worker_process.block_copies import BlockCopies
from diptych.worker_process.kv_tiers import KvTiers, Loaded

pytestmark = pytest.mark.asyncio
LAYOUT = KVLayout(2, 1, 4, 4, torch.float32)
BLOCKS = 12
KEYS = [number.to_bytes(16, "big") for number in range(1, 40)]


class SlowTier(RamTier):
    """Tier that answers when it is let."""

    def __init__(self, quota: int) -> None:
        super().__init__(quota)
        self.open = threading.Event()
        self.open.set()

    def get(self, key: bytes) -> bytes | None:
        self.open.wait(30)
        return super().get(key)

    def forget(self, keys: Sequence[bytes]) -> None:  # type: ignore[override]
        self.open.wait(30)
        super().forget(keys)


class House:
    """A pool with tiers, and a prefill that writes the key's bytes into its block."""

    def __init__(
        self,
        tiers: Sequence[RamTier | DiskTier],
        copies: Callable[[KVMemory], BlockCopies | None] = lambda memory: None,
    ) -> None:
        self.memory = KVMemory(LAYOUT, BLOCKS)
        self.pool = BlockPool(BLOCKS)
        self.stack = TierStack(tiers, EntryFormat(b"f" * 16, LAYOUT.bytes_per_block))
        self.left: list[bytes] = []
        self.found: list[bytes] = []
        self.tiers = KvTiers(
            self.memory,
            self.pool,
            self.stack,
            changed=lambda: None,
            moved=self.moved,
            copies=copies(self.memory),
        )

    def moved(self, tiered: Sequence[bytes], gone: Sequence[bytes]) -> None:
        self.found.extend(tiered)
        self.left.extend(gone)

    def compute(self, keys: Sequence[bytes], held: Sequence[int] = ()) -> None:
        """Compute and publish what is missing of a prefix, as a request does, and release it."""
        blocks = self.pool.acquire_prefix(keys)
        fresh = self.pool.allocate(len(keys) - len(blocks))
        for key, block in zip(keys[len(blocks) :], fresh, strict=True):
            self.memory.block_bytes(block)[:] = content(key)
        blocks += fresh
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self.pool.insert(block, key, keys[place - 1] if place else b"")
        added, _ = self.pool.drain_events()
        self.tiers.entered(added)
        self.pool.release(blocks)

    async def load(self, keys: Sequence[bytes]) -> Loaded | None:
        done: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        return await done if self.tiers.load(keys, done.set_result) else None

    def check(self, keys: Sequence[bytes]) -> int:
        """Check every block that is cached under these keys; return how many lead."""
        blocks = self.pool.acquire_prefix(keys)
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(self.memory.block_bytes(block)) == content(key)
        self.pool.release(blocks)
        return len(blocks)


def content(key: bytes) -> bytes:
    return key * (LAYOUT.bytes_per_block // 16)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    entry = EntryFormat(b"f" * 16, LAYOUT.bytes_per_block).entry_bytes
    made = House([SlowTier(8 * entry), DiskTier(tmp_path, 30 * entry, b"f" * 16)])
    yield made
    made.stack.tiers[0].open.set()  # type: ignore[attr-defined]
    await asyncio.to_thread(made.tiers.close)
    await until(lambda: made.pool.available() == BLOCKS)
    made.pool.invariants()


async def stored(house: House, keys: Sequence[bytes]) -> None:
    house.compute(keys)
    await until(lambda: all(key in house.stack for key in keys))
    await until(lambda: house.pool.available() == BLOCKS)


async def test_prefix_that_the_pool_has_lost_comes_back_with_its_content(house: House) -> None:
    await stored(house, KEYS[:6])
    await stored(house, KEYS[20:31])  # all of the first prefix has to leave but for one block
    assert house.pool.match(KEYS[:6]) < 6
    loaded = await house.load(KEYS[:8])
    assert loaded is not None
    assert loaded.blocks.total() >= 5
    assert house.check(KEYS[:6]) == 6
    assert await house.load(KEYS[:8]) is None, "the pool has all that the tiers have"


async def test_blocks_of_a_disk_are_found_by_the_next_process(house: House, tmp_path: Path) -> None:
    await stored(house, KEYS[:5])
    entry = house.stack._format.entry_bytes
    again = House([DiskTier(tmp_path, 30 * entry, b"f" * 16)])
    loaded = await again.load(KEYS[:5])
    assert loaded is not None
    assert loaded.blocks == {"disk": 5}
    assert again.check(KEYS[:5]) == 5
    await asyncio.to_thread(again.tiers.close)


async def test_damaged_block_ends_what_is_loaded(house: House, tmp_path: Path) -> None:
    await stored(house, KEYS[:5])
    entry = house.stack._format.entry_bytes
    victim = next((tmp_path / (b"f" * 16).hex()).glob(f"{KEYS[2].hex()}-*.kv"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    again = House([DiskTier(tmp_path, 30 * entry, b"f" * 16)])
    loaded = await again.load(KEYS[:5])
    assert loaded is not None
    assert loaded.blocks.total() == 2
    assert again.check(KEYS[:5]) == 2
    assert again.stack.damaged == 1
    assert not victim.exists()
    await asyncio.to_thread(again.tiers.close)


async def test_tier_that_hangs_is_a_miss_and_holds_no_block(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "LOAD_S", 0.2)
    await stored(house, KEYS[:6])
    await stored(house, KEYS[20:31])
    house.stack.tiers[0].open.clear()  # type: ignore[attr-defined]
    started = time.monotonic()
    loaded = await house.load(KEYS[:6])
    assert loaded is not None
    assert not loaded.blocks
    assert time.monotonic() - started < 20
    assert house.pool.available() == BLOCKS


async def test_flush_reaches_the_tiers_and_nothing_is_loaded_before(house: House) -> None:
    await stored(house, KEYS[:4])
    house.stack.tiers[0].open.clear()  # type: ignore[attr-defined]
    house.pool.clear_cache()
    assert await house.load(KEYS[:4]) is None
    house.stack.tiers[0].open.set()  # type: ignore[attr-defined]
    await until(lambda: house.stack.keys() == [] and not house.tiers.loads.held_up)
    await until(lambda: sorted(house.left) == KEYS[:4])


async def test_distrust_takes_what_continues_the_block(house: House) -> None:
    await stored(house, KEYS[:4])
    house.pool.forget([KEYS[1]])
    await until(lambda: sorted(house.stack.keys()) == KEYS[:1])
    assert house.pool.match(KEYS[:4]) == 1


async def test_load_takes_no_block_from_anyone(house: House) -> None:
    await stored(house, KEYS[:8])
    await stored(house, KEYS[20:31])
    busy = house.pool.allocate(BLOCKS - 4)
    loaded = await house.load(KEYS[:8])
    assert loaded is not None
    assert loaded.blocks.total() <= 4
    assert house.pool.available() == 4
    assert house.check(KEYS[:8]) <= 4
    house.pool.release(busy)


async def test_blocks_that_are_evicted_before_their_turn_are_copied_then(house: House) -> None:
    for start in range(0, 27, 9):  # far faster than the copier
        house.compute(KEYS[start : start + 9])
    await until(lambda: all(key in house.stack for key in KEYS[:27]))
    loaded = await house.load(KEYS[:9])
    assert loaded is not None
    assert house.check(KEYS[:9]) == 9


async def test_eviction_waits_for_the_copy_that_runs(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, real = threading.Event(), threading.Event(), kv_tiers._copy_of

    def slow(memory: KVMemory, block: int) -> memoryview:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go.wait(30)
        return real(memory, block)

    monkeypatch.setattr(kv_tiers, "_copy_of", slow)
    house.compute(KEYS[:1])
    await asyncio.to_thread(begun.wait, 30)
    threading.Timer(0.2, go.set).start()
    blocks = house.pool.allocate(BLOCKS)
    assert go.is_set(), "the block was given out while its copy ran"
    for block in blocks:
        house.memory.block_bytes(block)[:] = bytes(LAYOUT.bytes_per_block)
    house.pool.release(blocks)
    await until(lambda: KEYS[0] in house.stack)
    assert await house.load(KEYS[:1]) is not None
    assert house.check(KEYS[:1]) == 1


async def test_nothing_is_asked_of_a_tier_until_its_late_read_returns(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "LOAD_S", 0.05)
    await stored(house, KEYS[:6])
    await stored(house, KEYS[20:31])
    house.stack.tiers[0].open.clear()  # type: ignore[attr-defined]
    first = await house.load(KEYS[:6])
    assert first is not None
    assert not first.blocks
    assert await house.load(KEYS[:6]) is None
    house.stack.tiers[0].open.set()  # type: ignore[attr-defined]
    await until(lambda: house.tiers.loads.late is None or house.tiers.loads.late.done())
    monkeypatch.setattr(tier_loads, "LOAD_S", 30.0)
    again = await house.load(KEYS[:6])
    assert again is not None
    assert house.check(KEYS[:6]) == 6


async def test_what_another_worker_stores_is_told_and_loaded(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "RESCAN_S", 0.02)
    monkeypatch.setattr(disk, "RESCAN_S", 0.0)
    monkeypatch.setattr(disk, "_RESCAN_SHARE", 1e9)
    entry = house.stack._format.entry_bytes
    other = House([DiskTier(tmp_path, 30 * entry, b"f" * 16)])
    other.tiers.start()
    await stored(house, KEYS[:5])
    await until(lambda: sorted(other.found) == KEYS[:5])
    loaded = await other.load(KEYS[:5])
    assert loaded is not None
    assert other.check(KEYS[:5]) == 5
    house.pool.forget(KEYS[:1])
    await until(lambda: not house.stack.keys())
    await until(lambda: not other.stack.keys())
    assert other.left == [], "they are in its pool"
    await asyncio.to_thread(other.tiers.close)


async def test_fill_writes_into_the_blocks_of_the_caller(house: House) -> None:
    await stored(house, KEYS[:6])
    mine = house.pool.allocate(4)
    loaded = await house.tiers.fill(KEYS[:6], 2, mine)
    assert loaded.blocks.total() == 4
    assert [bytes(house.memory.block_bytes(block)) for block in mine] == [content(key) for key in KEYS[2:6]]
    assert not (await house.tiers.fill(KEYS[30:34], 0, mine)).blocks
    house.pool.release(mine)


async def test_fill_takes_nothing_after_a_flush(house: House) -> None:
    await stored(house, KEYS[:6])
    mine = house.pool.allocate(6)
    house.stack.tiers[0].open.clear()  # type: ignore[attr-defined]
    filling = asyncio.ensure_future(house.tiers.fill(KEYS[:6], 0, mine))
    await asyncio.sleep(0.05)
    house.pool.clear_cache()
    house.stack.tiers[0].open.set()  # type: ignore[attr-defined]
    assert not (await filling).blocks
    house.pool.release(mine)
