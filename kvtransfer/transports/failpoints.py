"""Deliberate damage for tests that must notice it, off unless armed by the environment of the process.

Names: `handoff.swap_blocks`, `handoff.drop_block`, `handoff.corrupt_push`; of frames on a data socket
`handoff.swap_push`, `handoff.replay_push` and `handoff.truncate_push`.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.failpoints import failpoint
from kvtransfer.protocol.messages import GrantRef


def damage_blocks(memory: KVMemory, block_ids: Sequence[int], num_tokens: int) -> None:
    """Swap the contents of two blocks of a sequence, or blank one of them, after verification."""
    full = memory.layout.blocks_for(num_tokens)
    if failpoint("handoff.swap_blocks") and full >= 2:
        first, second = memory.block_bytes(block_ids[0]), memory.block_bytes(block_ids[full - 1])
        first[:], second[:] = bytes(second), bytes(first)
    if failpoint("handoff.drop_block"):
        memory.block_bytes(block_ids[0])[:] = bytes(memory.layout.bytes_per_block)


def damage_payload(payload: memoryview) -> memoryview:
    """Return the payload with one bit flipped, after its digest was taken."""
    if not failpoint("handoff.corrupt_push"):
        return payload
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(damaged)


def damage_place(ref: GrantRef, index: int) -> tuple[GrantRef, int]:
    """Return a frame's grant and index, damaged: the neighbour's index, or an earlier generation."""
    if failpoint("handoff.swap_push"):
        return ref, index ^ 1
    if failpoint("handoff.replay_push"):
        return ref._replace(generation=max(ref.generation - 1, 0)), index
    return ref, index


def truncate_payload(payload: memoryview) -> memoryview:
    """Return the part of a frame's bytes that is sent, after a header that promises all of them."""
    return payload[: len(payload) // 2] if failpoint("handoff.truncate_push") else payload
