"""Blocks between the pool of a decode worker and its tiers (diptych/engine/kv/tiers).

**Out.** A block that enters the prefix cache is copied to the tiers soon after, by a thread of its own: one
block at a time is held for the time of the copy, and is not given out meanwhile. Where the thread falls
behind, the oldest blocks that wait are left out.

**In.** When an attempt is announced and a tier holds more of its prefix than the pool does, the announcement
waits while another thread reads these blocks: into memory of its own, where they are checked, then into
blocks that are taken from the pool for the copy alone. They enter the prefix cache as computed blocks do, and
the attempt's grant finds them there. What has not come within `LOAD_S` is a miss, and a tier that hangs holds
no block.

All calls are made on the event loop, but where it is said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.stack import StoredBlock, TierStack
from kvtransfer.transports.host_blocks import read_block, write_block

LOAD_S = 0.5
"""Most seconds that an attempt waits for blocks from tiers: less than a prefill worker's ask waits for it."""
BATCH = 16
"""Blocks that are read, checked and copied at a time."""
MOST_QUEUED = 4096
"""Most blocks that wait to be copied out."""
MOST_LOADS = 8
"""Loads at a time; where a tier hangs, further attempts do without."""
_log = logging.getLogger(__name__)


@dataclass
class Loaded:
    """Result of a load: blocks by tier, and the time that the attempt waited for them."""

    blocks: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class KvTiers:
    """Mover of blocks between `pool` and `stack`."""

    def __init__(
        self,
        memory: KVMemory,
        pool: BlockPool,
        stack: TierStack,
        *,
        running: Callable[[], int],
        changed: Callable[[], None],
        left: Callable[[Sequence[bytes]], None],
    ) -> None:
        """Take the number of sequences that run, each of which needs a block to grow, and two callbacks.

        `changed` is called when blocks were released or the prefix cache has changed, `left` with keys that
        are neither in a tier nor in the pool any more.
        """
        self._memory = memory
        self._pool = pool
        self.stack = stack
        self._running = running
        self._changed = changed
        self._left = left
        stack.on_dropped = lambda keys: self._on_loop(self._dropped, keys)
        self._queue: deque[bytes] = deque(maxlen=MOST_QUEUED)
        self._storing = False
        self._forgetting = 0
        self._overdue = 0  # reads that an attempt has given up, and that have not returned
        self._loads: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._out = ThreadPoolExecutor(1, "kv-tiers-out")
        self._in = ThreadPoolExecutor(1, "kv-tiers-in")
        pool.on_forgotten.append(self._forget)

    def close(self) -> None:
        """Wait until no thread reads or writes the pool, and close the tiers."""
        self._queue.clear()
        self._out.shutdown(cancel_futures=True)
        self._in.shutdown(cancel_futures=True)
        self.stack.close()

    # ---- out -----------------------------------------------------------------------------------------

    def entered(self, keys: Iterable[bytes]) -> None:
        """Take the keys that entered the prefix cache."""
        self._queue.extend(keys)
        self._store_next()

    def _store_next(self) -> None:
        while self._queue and not self._storing:
            key = self._queue.popleft()
            if key in self.stack or (held := self._pool.hold(key)) is None:
                continue
            self._storing = True
            self._loop = self._loop or asyncio.get_running_loop()
            block, parent = held
            future = self._out.submit(self._store, key, parent, block, self.stack.epoch)
            future.add_done_callback(lambda done: self._on_loop(self._stored, done))

    def _store(self, key: bytes, parent: bytes, block: int, epoch: int) -> None:
        """Copy a block that is held, release it, and put the copy into the tiers. Runs on a thread."""
        try:
            payload = bytes(read_block(self._memory, block))
        finally:
            self._on_loop(self._release, [block])
        self.stack.put(key, parent, payload, epoch)

    def _stored(self, done: Future[None]) -> None:
        self._storing = False
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("a block could not be stored in the tiers", exc_info=error)
        self._store_next()

    def _release(self, blocks: Sequence[int]) -> None:
        self._pool.release(blocks)
        self._changed()

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _dropped(self, keys: Sequence[bytes]) -> None:
        """Tell which of the keys that left the tiers are not in the pool either."""
        if gone := [key for key in keys if not self._pool.match([key])]:
            self._left(gone)

    # ---- in ------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], then: Callable[[Loaded], None]) -> bool:
        """Bring the blocks of a prefix into the pool that a tier holds and the pool lacks.

        `then` gets the result. False, and no call follows, where there is nothing to bring.
        """
        first = self._pool.match(keys)
        count = self.stack.leading(keys[first:])
        if not count or self._forgetting or self._overdue or len(self._loads) >= MOST_LOADS:
            return False
        self._loop = self._loop or asyncio.get_running_loop()
        task = self._loop.create_task(self._load(keys[: first + count], first, then), name="load from tiers")
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return True

    async def _load(self, keys: Sequence[bytes], first: int, then: Callable[[Loaded], None]) -> None:
        loaded, started = Loaded(), time.monotonic()
        held = self._pool.acquire_prefix(keys[:first])  # else their eviction would make room for the rest
        try:
            if len(held) == first:
                await self._load_after(keys, first, held, loaded, started + LOAD_S)
        except Exception:
            _log.exception("blocks could not be loaded from the tiers")
        finally:
            self._release(held)
        loaded.seconds = time.monotonic() - started
        then(loaded)

    async def _load_after(
        self, keys: Sequence[bytes], first: int, held: list[int], loaded: Loaded, until: float
    ) -> None:
        """Load `keys[first:]` batch by batch; the blocks join `held`."""
        epoch = self.stack.epoch
        for start in range(first, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            parents = [keys[place - 1] if place else b"" for place in range(start, start + len(batch))]
            found = await self._in_time(until, self._read, batch, parents, until)
            room = max(self._pool.available() - self._running(), 0)
            if not found or not room or self.stack.epoch != epoch:
                return
            whole = len(found) == len(batch) <= room
            found = found[:room]
            blocks = self._pool.allocate(len(found))
            held += blocks
            # Not bounded: it is memory alone, and the blocks are ours until it is done.
            await asyncio.wrap_future(self._in.submit(self._fill, blocks, found))
            if self.stack.epoch != epoch:
                return
            for block, one in zip(blocks, found, strict=True):
                self._pool.insert(block, one.key, one.parent)
                loaded.blocks[one.tier] += 1
            if not whole:
                return

    async def _in_time(
        self, until: float, read: Callable[..., list[StoredBlock]], *arguments: object
    ) -> list[StoredBlock]:
        """Return what `read` returns on the thread for loads; nothing if that takes too long."""
        reading = self._in.submit(read, *arguments)
        future = asyncio.shield(asyncio.wrap_future(reading))
        done, _ = await asyncio.wait([future], timeout=max(until - time.monotonic(), 0.0))
        if done:
            return future.result()
        if not reading.cancel():  # it has begun, and what it reads is dropped
            self._overdue += 1
            reading.add_done_callback(lambda _: self._on_loop(self._returned))
        return []

    def _returned(self) -> None:
        self._overdue -= 1

    def _read(self, keys: Sequence[bytes], parents: Sequence[bytes], until: float) -> list[StoredBlock]:
        """Read leading blocks into memory of their own, checked, until a miss or the time. On a thread."""
        found: list[StoredBlock] = []
        for key, parent in zip(keys, parents, strict=True):
            one = self.stack.get(key, parent) if time.monotonic() < until else None
            if one is None:
                break
            found.append(one)
        return found

    def _fill(self, blocks: Sequence[int], found: Sequence[StoredBlock]) -> None:
        """Write what was read into blocks that are held for it. Runs on a thread."""
        for block, one in zip(blocks, found, strict=True):
            write_block(self._memory, block, one.payload)

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Forget keys and what continues them, or everything where none is named."""
        self._queue.clear()
        self.stack.end_epoch()
        self._forgetting += 1  # nothing is loaded until it is done: a disk may take its time
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
        self._forgetting -= 1
