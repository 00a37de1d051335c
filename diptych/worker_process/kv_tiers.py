"""Blocks between the pool of a worker and its tiers (diptych/engine/kv/tiers).

**Out.** A block that enters the prefix cache is copied soon after, by a thread of its own, one at a time, and
then stored by another thread. A block whose copy runs is not given out: its eviction waits for that copy,
which is one of memory alone. One that is evicted before is copied at that moment. Nothing is held for this,
so that no sequence has to make way for it, but one block that the ranks of a group have shares of: their
answers may take a step. Where tiers are slower than blocks come, blocks are left out.

**In, at a decode worker.** When an attempt is announced and a tier holds more of its prefix than the pool
does, the announcement waits while another thread reads these blocks into memory of its own, where they are
checked. Then the event loop takes a block of the pool, copies, and enters it into the prefix cache, one after
the other: between two of them nothing is held. The attempt's grant finds them there as it finds computed
blocks. On a GPU, or where ranks hold shares, those of a batch are copied together (block_copies.py). What has
not come within `LOAD_S` is a miss; until a read that was too slow returns, no other begins.

**In, at a prefill worker that copies.** It holds blocks of scratch for a whole prompt before it asks for a
grant, and what tiers have of the prompt is copied into these.

**From others.** A folder or a server that several workers share is read again now and then: what others
stored there can be loaded from then on.

All calls are made on the event loop, but where it is said.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.tiers.pinned import PinnedEntry
from diptych.engine.kv.tiers.stack import StoredBlock, TierStack
from diptych.runtime.failpoints import reach
from diptych.worker_process.block_copies import BlockCopies, Mark
from diptych.worker_process.tier_loads import MOST_LOADS, TierLoads
from diptych.worker_process.tier_writes import Fresh, TierWrites
from kvtransfer.transports.host_blocks import host_view

MOST_QUEUED = 4096
"""Most blocks that wait to be copied out."""
MOST_COPIES = 32
"""Most copies that wait to be stored."""
CLOSE_S = 2.0
"""Time at the end for what is being stored."""
RESCAN_S = 5.0
"""Time between two looks at what others stored."""
_log = logging.getLogger(__name__)


class KvTiers:
    """Mover of blocks between `pool` and `stack`."""

    def __init__(
        self,
        memory: KVMemory,
        pool: BlockPool,
        stack: TierStack,
        *,
        changed: Callable[[], None],
        moved: Callable[[Sequence[bytes], Sequence[bytes]], None],
        copies: BlockCopies | None = None,
    ) -> None:
        """Take two callbacks, and what copies to and from a memory that is no whole one of the host.

        `changed` is called when blocks were released or the prefix cache has changed, `moved` with keys that
        are in a tier and not in the pool, as others stored them, and with keys that are in neither any more.
        """
        self._memory = memory
        self._pool = pool
        self.stack = stack
        self._changed = changed
        self._moved = moved
        stack.on_dropped = lambda keys: self._on_loop(self._dropped, keys)
        stack.on_found = lambda keys: self._on_loop(self._found, keys)
        self._copies = copies
        self._writes = TierWrites(memory, pool, copies, changed)
        self._queue: dict[bytes, tuple[int, bytes, Mark | None]] = {}
        self._copying: bytes | None = None
        self._held: list[int] = []
        """Block that is being copied, where it is held for that."""
        self._copied = threading.Event()
        self._storing = 0
        stage = None if copies is None else copies.stage
        self.loads = TierLoads(memory.layout.block_size, stack, stage)
        self._tasks: set[asyncio.Task[None]] = set()
        self._rescanning: Future[None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._copier = ThreadPoolExecutor(1, "kv-tiers-copy")
        self._out = ThreadPoolExecutor(1, "kv-tiers-out")
        pool.on_forgotten.append(self._forget)
        pool.on_evicted = self._evicted

    def __contains__(self, key: bytes) -> bool:
        """Return whether a tier holds this key."""
        return key in self.stack

    def start(self) -> None:
        """Begin to look for what others store in the tiers. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._rescan()

    def _rescan(self) -> None:
        if self._closed:
            return
        if self._rescanning is None or self._rescanning.done():
            try:
                self._rescanning = self._out.submit(self.stack.rescan)
            except RuntimeError:
                return  # closed a moment ago
        asyncio.get_running_loop().call_later(RESCAN_S, self._rescan)

    def close(self) -> None:
        """Wait until no thread reads the pool, and for a while for what is being stored; close the tiers.

        A tier that hangs is left behind: the process ends without its thread.
        """
        self._closed = True
        self._queue.clear()
        self._copier.shutdown(cancel_futures=True)
        self.loads.close()
        last = self._out.submit(self.stack.close)
        self._out.shutdown(wait=False)
        try:
            last.result(CLOSE_S)
        except TimeoutError:
            _log.warning("a KV tier does not answer: what it was to store is lost")

    # ---- out -----------------------------------------------------------------------------------------

    def cache_changed(self, added: Iterable[bytes], removed: Iterable[bytes]) -> list[bytes]:
        """Take the keys that entered and left the prefix cache; return those that left it for a tier."""
        self.entered(added)
        return [key for key in removed if key in self.stack]

    def entered(self, keys: Iterable[bytes]) -> None:
        """Take the keys that entered the prefix cache."""
        if not self.stack.stores:
            return
        computed = None if self._copies is None else self._copies.mark()
        for key in keys:
            if key not in self.stack and (place := self._pool.place_of(key)) is not None:
                self._queue[key] = (*place, computed)
        while len(self._queue) > MOST_QUEUED:
            del self._queue[next(iter(self._queue))]
        self._copy_next()

    def _copy_next(self) -> None:
        if not self._queue or self._copying is not None or self._storing >= MOST_COPIES:
            return
        self._loop = self._loop or asyncio.get_running_loop()
        key = next(iter(self._queue))
        block, parent, computed = self._queue.pop(key)
        self._copying, epoch = key, self.stack.epoch
        self._held = (
            self._pool.acquire_prefix([key]) if self._copies is not None and self._copies.holds else []
        )
        self._copied.clear()
        copy = self._copier.submit(self._copy, block, computed)
        copy.add_done_callback(lambda _: self._copied.set())  # also of a copy that is cancelled
        copy.add_done_callback(lambda done: self._on_loop(self._copy_done, key, parent, done, epoch))

    def _copy(self, block: int, computed: Mark | None) -> memoryview | PinnedEntry:
        """Return a copy of a block that nothing writes. Runs on the copier's thread."""
        reach("tiers.copy")
        if self._copies is not None and computed is not None:
            return self._copies.read(block, computed)
        return _copy_of(self._memory, block)

    def _copy_done(
        self, key: bytes, parent: bytes, done: Future[memoryview | PinnedEntry], epoch: int
    ) -> None:
        self._copying = None
        self._give_back()
        if not done.cancelled():
            self._store(key, parent, done.result(), epoch)
        self._copy_next()

    def _give_back(self) -> None:
        """Release the block that was held for its copy."""
        held, self._held = self._held, []
        if held:
            self._pool.release(held)
            self._changed()

    def _evicted(self, key: bytes, block: int) -> None:
        """Return when an evicted block may be written over, with a copy of it if there was none."""
        if key == self._copying:
            self._copied.wait()
            return
        place = self._queue.pop(key, None)
        # A device, or a rank, has to be waited for, which an event loop does not.
        if place is not None and self._storing < MOST_COPIES and self._copies is None:
            self._store(key, place[1], _copy_of(self._memory, block), self.stack.epoch)

    def _store(self, key: bytes, parent: bytes, payload: memoryview | PinnedEntry, epoch: int) -> None:
        self._storing += 1
        future = self._out.submit(self.stack.put, key, parent, payload, epoch)
        future.add_done_callback(lambda done: self._on_loop(self._stored, done))

    def _stored(self, done: Future[None]) -> None:
        self._storing -= 1
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("a block could not be stored in the tiers", exc_info=error)
        self._copy_next()

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _dropped(self, keys: Sequence[bytes]) -> None:
        """Tell which of the keys that left the tiers are not in the pool either."""
        if gone := [key for key in keys if not self._pool.match([key])]:
            self._moved((), gone)

    def _found(self, keys: Sequence[bytes]) -> None:
        """Tell which of the keys that others stored are not in the pool."""
        if new := [key for key in keys if not self._pool.match([key])]:
            self._moved(new, ())

    # ---- in ------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], then: Callable[[Loaded], None]) -> bool:
        """Bring the blocks of a prefix into the pool that a tier holds and the pool lacks.

        `then` gets the result. False, and no call follows, where there is nothing to bring.
        """
        first = self._pool.match(keys)
        count = self.loads.leading(keys[first:])
        if not count or len(self._tasks) >= MOST_LOADS:
            return False
        self._loop = self._loop or asyncio.get_running_loop()
        task = self._loop.create_task(self._load(keys[: first + count], first, then), name="load from tiers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def fill(self, keys: Sequence[bytes], first: int, blocks: Sequence[int]) -> Loaded:
        """Load what tiers hold of `keys[first:]` into `blocks`, which the caller holds and nothing writes.

        `keys` are those of a prefix from its beginning. As many leading blocks as the result counts are
        filled; what else was read is in none.
        """
        count = self.loads.leading(keys[first:])

        async def take(place: int, batch: Sequence[StoredBlock], fresh: Fresh) -> int:
            begin = place - first
            return await self._writes.fill(blocks[begin : begin + len(batch)], batch, fresh)

        return await self.loads.load(keys[: first + count], first, take) if count else Loaded()

    async def _load(self, keys: Sequence[bytes], first: int, then: Callable[[Loaded], None]) -> None:
        async def take(_: int, batch: Sequence[StoredBlock], fresh: Fresh) -> int:
            return await self._writes.cache(batch, fresh)

        loaded = await self.loads.load(keys, first, take)
        if loaded.blocks:
            self._changed()
        then(loaded)

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Forget keys and what continues them, or everything where none is named."""
        self._queue.clear()
        self.stack.end_epoch()
        self.loads.held_up += 1  # nothing is loaded until it is done: a disk may take its time
        self._loop = self._loop or asyncio.get_running_loop()
        done = self._out.submit(self.stack.forget, list(keys)) if keys else self._out.submit(self.stack.clear)
        done.add_done_callback(lambda future: self._on_loop(self._forgotten, future))

    def _forgotten(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            # What could not be removed would be found again.
            _log.critical(
                "blocks could not be removed from the tiers, which are not read any more: %s", error
            )
            return
        self.loads.held_up -= 1


def _copy_of(memory: KVMemory, block: int) -> memoryview:
    """Return a copy of a block of host memory."""
    size = memory.layout.bytes_per_block
    copy = torch.empty(size, dtype=torch.uint8)
    # Neither a slice, which keeps the interpreter's lock, nor torch, which takes several threads for it.
    ctypes.memmove(copy.data_ptr(), memory.address + block * size, size)
    return host_view(copy)
