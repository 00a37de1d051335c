"""Allocation where layers with a window lie in blocks of their own: a grant has a table for each group.

The full blocks cover all tokens of the attempt, cached prefix first. The windowed ones cover the window and
one chunk: the writer uses them as a ring (diptych/engine/kv/window_table.py). A writer that copies sends what
stays of them in the end, so that its grant has no more than that.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_prefix import WindowPrefix
from kvtransfer.protocol.grants import Allocation, BlockAllocator
from kvtransfer.protocol.messages import PendingTransfer


class WindowAllocator(BlockAllocator):
    """Allocation of full and windowed blocks; the rule is that of `BlockAllocator`, by places."""

    def __init__(
        self, pool: BlockPool, block_size: int, running: Callable[[], int], groups: WindowGroups
    ) -> None:
        super().__init__(pool, block_size, running)
        self._groups = groups
        self._prefix = WindowPrefix(pool, groups, block_size)

    def blocks_needed(self, pending: PendingTransfer, chunk: int) -> int:
        """Return the number of blocks that the attempt holds without a cached prefix, with its reserve."""
        places = self.places_for(pending.num_tokens)
        return max(places, pending.reserve_blocks or 0) + self._windowed(pending, places, chunk)

    def allocate(self, pending: PendingTransfer, chunk: int) -> Allocation | None:
        """Pin the cached prefix and allocate the rest; None, and nothing changed, while room is short.

        The ring is longer for a prompt that shares more with earlier ones than it can use, if there is room.
        """
        keys = pending.keys[: (pending.num_tokens - 1) // self._block_size]
        hit = self._prefix.acquire(keys)
        places, cached = self.places_for(pending.num_tokens), len(hit.full)
        full = max(places, pending.reserve_blocks or 0)
        tail = self._prefix.tail(keys, cached, places) if chunk else 0
        for wanted in (tail, 0) if tail else (0,):
            blocks = full + self._windowed(pending, places - cached, chunk, wanted)
            if self._has_room(pending, blocks - cached, blocks + len(hit.pinned)):
                found = hit.full + self._pool.allocate(blocks - cached)
                end = places + self._ring(places - cached, chunk, wanted)
                ring = self._groups.ring_of(found[places:end], places, wanted)
                return Allocation(found, cached, end, tuple(hit.pinned), tuple(ring))
        self._pool.release(hit.blocks)
        return None

    @property
    def _spare_each(self) -> int:
        return self._groups.blocks_per_place

    def _ring(self, places: int, chunk: int, tail: int = 0) -> int:
        """Return the windowed blocks that a writer fills for so many places behind the cached prefix."""
        if not chunk:
            return self._groups.tables * min(places, self._groups.kept(self._block_size))
        return self._groups.ring_blocks(places, chunk, self._block_size, tail)

    def _windowed(self, pending: PendingTransfer, places: int, chunk: int, tail: int = 0) -> int:
        """Return the ring, or more where a reserve has to hold what is kept of it and goes on from there."""
        kept = self._groups.tables * min(places, self._groups.kept(self._block_size))
        return max(self._ring(places, chunk, tail), kept + pending.reserve_windowed)
