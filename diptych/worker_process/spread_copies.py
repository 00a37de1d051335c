"""Copies of whole blocks of a group whose ranks have memories of their own.

**Out.** Rank 0 gathers the shares of a block that is published: its step is over for every rank. A rank
answers once it has carried out the writes ordered before, so the block is held meanwhile.

**In.** Rank 0 scatters a block that was verified whole. Each rank writes its share between two steps and says
so, and the block enters the prefix cache when all have: no rank of this worker, and none of another one that
maps this memory, reads a block of which a share is missing.

So tiers hold whole blocks whatever the degree, each in one entry, of which no share can be lost alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diptych.engine.kv.kv_memory import KVMemory, SpreadBlocks
from diptych.runtime.failpoints import reach
from diptych.runtime.task_cancellation import to_its_end
from diptych.worker_process.block_copies import Mark
from kvtransfer.transports.blocking import queued_work


class _Computed:
    """Mark of host memory, whose steps are over when their blocks are published."""

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""


class SpreadCopies:
    """Copies of the blocks of `memory`, whose shares `spread` gathers and scatters. See `BlockCopies`."""

    holds = True

    def __init__(self, memory: KVMemory, spread: SpreadBlocks) -> None:
        self._memory, self._spread = memory, spread

    def mark(self) -> Mark:
        """See `BlockCopies.mark`."""
        return queued_work(self._memory) or _Computed()

    def read(self, block: int, computed: Mark) -> memoryview:
        """See `BlockCopies.read`. Ends the process where a rank does not answer."""
        computed.synchronize()
        return self._spread.gather_block(block)

    def stage(self, payload: memoryview) -> memoryview:
        """Return the bytes where torch may view them: those of an entry may not be written."""
        return memoryview(bytearray(payload)) if payload.readonly else payload

    async def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """See `BlockCopies.write`. Ends the process where a rank does not answer."""
        # Until then ranks write to the blocks, also where this is cancelled.
        await to_its_end(asyncio.to_thread(self._write, blocks, payloads))

    def _write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self._spread.scatter_block(block, payload)
            reach("tiers.write")
        self._spread.await_writes()
