"""Copies beside the steps of a device, rehearsed: two threads stand for the streams of a GPU.

Memory is the host's. As on a GPU, what is queued runs later and in its queue's order, and only marks order
one queue after the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.pinned import PinnedSlots
from diptych.engine.kv.tiers.ram import RamTier
from diptych.runtime.kv_tier_specs import parse_tiers
from diptych.worker_process.block_copies import Mark
from diptych.worker_process.device_copies import Copy, DeviceCopies
from diptych.worker_process.tier_stack import make_stack
from tests.diptych.engine.kv.tiers.test_pinned import Lock
from tests.diptych.worker_process.test_kv_tiers import BLOCKS, KEYS, LAYOUT, House, content, stored, until
from tests.kvtransfer.conftest import FINGERPRINT

pytestmark = pytest.mark.asyncio
ENTRY = EntryFormat(b"f" * 16, LAYOUT.bytes_per_block).entry_bytes


class Reached:
    """Mark in a queue: a job that is over."""

    def __init__(self, job: Future[None]) -> None:
        self._job = job

    def synchronize(self) -> None:
        self._job.result(30)


class Queues:
    """Streams of a device: one of steps, one of copies (`CopyQueue`)."""

    def __init__(self) -> None:
        self._steps, self._copies = ThreadPoolExecutor(1, "steps"), ThreadPoolExecutor(1, "copies")
        self.open = threading.Event()
        self.open.set()
        """Copies run while it is set."""
        self.ordered = True
        """False: copies do not wait for the mark of the steps, which is the planted bug."""

    def step(self, step: object) -> None:
        """Queue a step, which is a function."""
        self._steps.submit(step)  # type: ignore[arg-type]

    def mark_steps(self) -> Mark:
        return Reached(self._steps.submit(lambda: None))

    def copy(self, copies: Sequence[Copy], after: Mark) -> Mark:
        def run() -> None:
            if self.ordered:
                after.synchronize()
            self.open.wait(30)
            for destination, source in copies:
                destination.copy_(source)

        return Reached(self._copies.submit(run))

    def close(self) -> None:
        self.open.set()
        self._steps.shutdown()
        self._copies.shutdown()


class Device(House):
    """A pool whose blocks are copied by way of the queues, with tiers in page-locked memory and on a disk."""

    def __init__(self, folder: Path, slots: PinnedSlots | None) -> None:
        self.queues = Queues()
        quota = 8 * ENTRY if slots is None else slots.entries * ENTRY
        ram, disk = RamTier(quota, slots=slots), DiskTier(folder, 30 * ENTRY, b"f" * 16)
        super().__init__([ram, disk], copies=lambda memory: DeviceCopies(memory, slots, self.queues))


@pytest_asyncio.fixture(params=["page-locked", "pageable"])
async def device(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    slots = PinnedSlots(10 * (ENTRY + 64), ENTRY, Lock()) if request.param == "page-locked" else None
    made = Device(tmp_path, slots)
    yield made
    made.queues.open.set()
    await asyncio.to_thread(made.tiers.close)
    made.queues.close()
    await until(lambda: made.pool.available() == BLOCKS)
    made.pool.invariants()
    if slots is not None:
        await until(lambda: slots.free == slots.count)


async def test_prefix_that_the_pool_has_lost_comes_back_with_its_content(device: Device) -> None:
    await stored(device, KEYS[:6])
    await stored(device, KEYS[20:31])  # all of the first prefix has to leave but for one block
    assert device.pool.match(KEYS[:6]) < 6
    loaded = await device.load(KEYS[:8])
    assert loaded is not None
    assert loaded.blocks.total() >= 5
    assert device.check(KEYS[:6]) == 6


async def test_block_is_copied_out_after_the_step_that_computes_it(device: Device) -> None:
    go = threading.Event()
    (block,) = device.pool.allocate(1)

    def step() -> None:
        go.wait(30)
        device.memory.block_bytes(block)[:] = content(KEYS[0])

    device.queues.step(step)
    device.pool.insert(block, KEYS[0], b"")
    device.tiers.entered(device.pool.drain_events()[0])
    await asyncio.sleep(0.05)
    assert KEYS[0] not in device.stack
    go.set()
    await until(lambda: KEYS[0] in device.stack)
    device.pool.release([block])
    found = device.stack.get(KEYS[0], b"")
    assert found is not None
    assert bytes(found.payload) == content(KEYS[0])


async def test_loaded_blocks_are_held_and_not_cached_before_they_are_there(device: Device) -> None:
    await stored(device, KEYS[:6])
    await stored(device, KEYS[20:31])
    there = device.pool.match(KEYS[:6])
    device.queues.open.clear()
    loading = asyncio.ensure_future(device.load(KEYS[:6]))
    await until(lambda: device.pool.available() < BLOCKS)
    assert device.pool.match(KEYS[:6]) == there
    device.queues.open.set()
    assert await loading is not None
    assert device.check(KEYS[:6]) == 6


@pytest.mark.parametrize("ordered", [True, False], ids=["", "control"])
async def test_copy_into_a_block_waits_for_steps_that_still_write_there(
    device: Device, ordered: bool
) -> None:
    device.queues.ordered = ordered
    await stored(device, KEYS[:6])
    mine, go = device.pool.allocate(6), threading.Event()

    def step() -> None:
        go.wait(30)
        for block in mine:  # for the sequence that had these blocks before
            device.memory.block_bytes(block)[:] = bytes(LAYOUT.bytes_per_block)

    device.queues.step(step)
    filling = asyncio.ensure_future(device.tiers.fill(KEYS[:6], 0, mine))
    await asyncio.sleep(0.1)
    go.set()
    assert (await filling).blocks.total() == 6
    device.queues.mark_steps().synchronize()
    right = [bytes(device.memory.block_bytes(block)) for block in mine] == [content(key) for key in KEYS[:6]]
    assert right == ordered
    device.pool.release(mine)


async def test_cancelled_load_holds_its_blocks_until_the_copy_is_done(device: Device) -> None:
    await stored(device, KEYS[:6])
    mine = device.pool.allocate(6)
    device.queues.open.clear()
    filling = asyncio.ensure_future(device.tiers.fill(KEYS[:6], 0, mine))
    await asyncio.sleep(0.1)
    filling.cancel()
    await asyncio.sleep(0.05)
    assert not filling.done()
    device.queues.open.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    device.pool.release(mine)


async def test_load_takes_no_block_from_anyone(device: Device) -> None:
    await stored(device, KEYS[:8])
    await stored(device, KEYS[20:31])
    busy = device.pool.allocate(BLOCKS - 4)
    loaded = await device.load(KEYS[:8])
    assert loaded is not None
    assert device.pool.available() == 4
    assert device.check(KEYS[:8]) == loaded.blocks.total() <= 4
    device.pool.release(busy)


async def test_flush_while_blocks_are_copied_leaves_none(device: Device) -> None:
    await stored(device, KEYS[:6])
    await stored(device, KEYS[20:31])
    device.queues.open.clear()
    loading = asyncio.ensure_future(device.load(KEYS[:6]))
    await until(lambda: device.pool.available() < BLOCKS)
    device.pool.clear_cache()
    device.queues.open.set()
    loaded = await loading
    assert loaded is not None
    assert not loaded.blocks
    assert device.pool.match(KEYS[:6]) == 0


@pytest.mark.parametrize(("limit", "locked"), [(1 << 30, True), (1 << 16, False)])
async def test_worker_says_whether_its_memory_is_page_locked(
    limit: int, locked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stack = make_stack(parse_tiers("ram:1m"), FINGERPRINT, LAYOUT.bytes_per_block, lock=Lock(limit))
    assert stack is not None
    said = "the ram tier has 1 MiB of page-locked memory" if locked else "not page-locked"
    assert said in caplog.text
    assert ("ulimit -l" in caplog.text) is not locked
    assert (stack.slots is not None) is locked
    stack.put(KEYS[0], b"", content(KEYS[0]), stack.epoch)
    found = stack.get(KEYS[0], b"")
    assert found is not None
    assert bytes(found.payload) == content(KEYS[0])
