"""Deliberate damage for tests that must see it. Its names: `handover.swap_blocks`, `handover.drop_block`,
`handover.corrupt_push`.

Off unless armed by the environment of the process.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_memory import KVMemory
from runtime.failpoints import failpoint


def damage_blocks(memory: KVMemory, block_ids: Sequence[int], num_tokens: int) -> None:
    """After verification: swap the contents of two blocks of a sequence, or blank one of them."""
    full = memory.layout.blocks_for(num_tokens)
    if failpoint("handover.swap_blocks") and full >= 2:
        first, second = memory.block_bytes(block_ids[0]), memory.block_bytes(block_ids[full - 1])
        first[:], second[:] = bytes(second), bytes(first)
    if failpoint("handover.drop_block"):
        memory.block_bytes(block_ids[0])[:] = bytes(memory.layout.bytes_per_block)


def damage_payload(payload: memoryview) -> memoryview:
    """After the digest was taken: flip one bit."""
    if not failpoint("handover.corrupt_push"):
        return payload
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(damaged)
