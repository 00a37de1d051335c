"""Pulls from a mapped pool: the prefill worker reads the cached prefix of its grants where it lies.

The decode worker takes no part, and cannot call a read back. So it keeps the pins of such a writer's grants,
as it keeps the writable blocks, until the writer has stopped or is proven dead: what is read does not change.
The bytes that were written to scratch are digested again and compared before they count.
"""

from __future__ import annotations

import asyncio
import logging

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.failpoints import reach
from kvtransfer.protocol.pull_table import Pull
from kvtransfer.transports.base import Run
from kvtransfer.transports.blocking import BlockingThread
from kvtransfer.transports.memory_mapping import MemoryMapping

ENDPOINT = "mapped"
"""Value of the welcome's `pull_endpoint` where the pool that the transport maps can be read."""
_log = logging.getLogger(__name__)


class MappedPullChannel:
    """End of the prefill worker: a thread that copies from the mapped `pool` into `scratch`."""

    def __init__(self, pool: KVMemory, scratch: KVMemory, mapping: MemoryMapping) -> None:
        self._pool, self._scratch, self._mapping = pool, scratch, mapping
        self._thread = BlockingThread("pull")
        self._copies: dict[Pull, asyncio.Task[None]] = {}
        self.broken = False
        """True once nothing more is read."""

    def request(self, pull: Pull) -> None:
        """Copy the blocks of a pull, after those of earlier ones."""
        self._copies[pull] = copying = asyncio.create_task(self._copy(pull))
        copying.add_done_callback(lambda _: self._copies.pop(pull, None))

    async def withdraw(self, pull: Pull) -> None:
        """Wait until the copy of a pull is over; one that has begun cannot be called back."""
        copying, cancelled = self._copies.get(pull), False
        while copying is not None and not copying.done():
            try:
                await asyncio.wait([copying])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def close(self) -> None:
        """Begin no more copies."""
        if not self.broken:
            self.broken = True
            self._thread.stop()

    async def _copy(self, pull: Pull) -> None:
        try:
            verified = await self._thread.run(self._copy_verified, pull)
        except Exception:  # of any kind: the blocks are computed instead
            _log.exception("cached blocks cannot be read from the decode worker's pool")
            verified = 0
        for index in range(pull.first, pull.first + verified):
            pull.arrived(index)
        pull.cut()

    def _copy_verified(self, pull: Pull) -> int:
        """Copy the blocks and return how many of the leading ones are as they were read. On the thread."""
        reach("prefill.pulled")
        run = Run(pull.ref, pull.first, self._pool, pull.source_ids, pull.block_ids)
        read = self._mapping.copy(run, self._scratch)
        written = self._mapping.digests(self._scratch, pull.block_ids, pull.ref, pull.first)
        return _equal_leading(read, written)


def _equal_leading(read: list[bytes], written: list[bytes]) -> int:
    pairs = enumerate(zip(read, written, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(read))
