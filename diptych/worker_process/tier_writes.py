"""Verified blocks of tiers on their way into a pool.

On a CPU one block after the other is taken, copied and entered into the prefix cache, so that between two of
them nothing is held. The blocks of a batch are held together while a GPU copies them beside the steps, or the
ranks of a group write their shares between two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from diptych.engine.kv.block_pool import BlockPool, OutOfBlocks
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.stack import StoredBlock
from diptych.runtime.failpoints import reach
from diptych.worker_process.block_copies import BlockCopies
from kvtransfer.transports.host_blocks import write_block

Fresh = Callable[[], bool]
"""Returns whether what was read may still be used: nothing was to be forgotten since."""


class TierWrites:
    """Writer of loaded blocks. All calls are made on the event loop."""

    def __init__(
        self, memory: KVMemory, pool: BlockPool, copies: BlockCopies | None, changed: Callable[[], None]
    ) -> None:
        """Take the pool and its memory; `changed` is called when blocks that a copy held are given back."""
        self._memory, self._pool, self._copies, self._changed = memory, pool, copies, changed

    async def cache(self, batch: Sequence[StoredBlock], fresh: Fresh) -> int:
        """Bring blocks, each of which continues the one before, into the pool and the prefix cache.

        Return how many leading ones are there: fewer if the pool has no room, or if the block before the
        first was evicted meanwhile.
        """
        if self._copies is not None:
            return await self._cache_together(batch, self._copies, fresh)
        for count, one in enumerate(batch):
            if not (fresh() and self._cache(one)):
                return count
            await asyncio.sleep(0)  # streams go on between two copies
        return len(batch)

    async def fill(self, blocks: Sequence[int], batch: Sequence[StoredBlock], fresh: Fresh) -> int:
        """Write blocks into `blocks`, which the caller holds; return how many leading ones are written."""
        if self._copies is not None:
            await self._copies.write(blocks, [one.payload for one in batch])
            return len(batch) if fresh() else 0
        for count, (block, one) in enumerate(zip(blocks, batch, strict=True)):
            if not fresh():
                return count
            write_block(self._memory, block, one.payload)
            await asyncio.sleep(0)
        return len(batch)

    def _cache(self, one: StoredBlock) -> bool:
        """Copy a block of the host into the pool and the prefix cache; False if that cannot be."""
        pool = self._pool
        if pool.match([one.key]):
            return True  # another attempt was faster
        before = pool.acquire_prefix([one.parent]) if one.parent else []  # else it may make room for this one
        try:
            if one.parent and not before:
                return False
            try:
                (block,) = pool.allocate(1)
            except OutOfBlocks:
                return False
            write_block(self._memory, block, one.payload)
            reach("tiers.write")
            cached = pool.insert(block, one.key, one.parent)
            pool.release([block])
            return cached
        finally:
            pool.release(before)

    async def _cache_together(self, batch: Sequence[StoredBlock], copies: BlockCopies, fresh: Fresh) -> int:
        """Copy blocks of the host into the pool together, and then enter them into the cache."""
        pool = self._pool
        there = next((place for place, one in enumerate(batch) if not pool.match([one.key])), len(batch))
        new = batch[there:]
        if not new or not fresh():
            return there
        before = pool.acquire_prefix([new[0].parent]) if new[0].parent else []
        if new[0].parent and not before:
            return there
        blocks: list[int] = []
        try:
            blocks = pool.allocate(min(len(new), pool.available()))
            new = new[: len(blocks)]
            await copies.write(blocks, [one.payload for one in new])
            for block, one in zip(blocks, new, strict=True):
                if not fresh() or not (pool.match([one.key]) or pool.insert(block, one.key, one.parent)):
                    break
                there += 1
        finally:
            pool.release([*blocks, *before])
            self._changed()
        return there
