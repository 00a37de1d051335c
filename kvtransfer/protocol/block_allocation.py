"""How many blocks an attempt gets, and when: the rule of growth.

A grant may not take the last blocks: one stays free for each running sequence, so that those that decode can
grow by at least one block whatever the prefills do. An attempt of several sequences waits until each of them
finds a first block of its own too, or until it is alone: more room than that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.messages import PendingTransfer


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks taken from the pool, cached prefix first."""

    block_ids: list[int]
    cached_blocks: int
    writable_blocks: int
    """How many of them the writer needs; the rest is reserved for growth."""


class BlockAllocator:
    """Draws on `pool`; `running()` is the number of sequences that decode now."""

    def __init__(self, pool: BlockPool, block_size: int, running: Callable[[], int]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._running = running

    def tokens(self, num_blocks: int) -> int:
        """Tokens in full blocks."""
        return num_blocks * self._block_size

    def blocks(self, expected: PendingTransfer) -> int:
        """Blocks to hold for it, the reserve included."""
        return max(self._blocks_for(expected.num_tokens), expected.reserve_blocks or 0)

    def draw(self, expected: PendingTransfer) -> Allocation | None:
        """Pin the cached prefix and allocate the rest; None: not enough room now, nothing changed."""
        # At least one token has to be computed: its logits give the first token.
        pins = self._pool.acquire_prefix(expected.keys[: (expected.num_tokens - 1) // self._block_size])
        blocks, running = self.blocks(expected), self._running()
        fresh = blocks - len(pins)
        spare = running
        if expected.reserve_blocks is None:
            spare += max(0, min(expected.sequences - 1, self._pool.total - blocks - running))
        if self._pool.available() - fresh < spare:
            self._pool.release(pins)
            return None
        return Allocation(pins + self._pool.allocate(fresh), len(pins), self._blocks_for(expected.num_tokens))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
