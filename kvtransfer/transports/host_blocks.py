"""Bytes and digests of blocks, for transports that send host memory: a view on the CPU, a copy from a GPU.

The digest of a pushed block is xxh3-128 over the grant, the block's index in it, and the bytes. The name of
the grant comes first, so that a block of another request, of an earlier generation, or of another index of
the same table is caught like a flipped bit. It guards against faults, not against forgers.
"""

from __future__ import annotations

import asyncio
import struct

import torch
import xxhash

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef

DIGEST_BYTES = 16
_PLACE = struct.Struct("<IQIII")
_PUSHED, _PULLED = 0, 1
"""Directions; seeds of the digests."""


def block_digest(ref: GrantRef, index: int, payload: bytes | bytearray | memoryview) -> bytes:
    """Return 16 bytes that bind `payload` to block `index` of the grant's table, pushed to its pool."""
    return _digest(ref, index, payload, _PUSHED)


def pulled_block_digest(ref: GrantRef, index: int, payload: bytes | bytearray | memoryview) -> bytes:
    """Return 16 bytes that bind `payload` to block `index` of the grant's table, pulled from its pool."""
    return _digest(ref, index, payload, _PULLED)


def _digest(ref: GrantRef, index: int, payload: bytes | bytearray | memoryview, direction: int) -> bytes:
    request_id, attempt = ref.key
    name = request_id.encode()
    place = _PLACE.pack(ref.slot, ref.generation, attempt, index, len(name))
    hasher = xxhash.xxh3_128(place, seed=direction)
    hasher.update(name)
    hasher.update(payload)
    return hasher.digest()


def host_view(flat: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous uint8 tensor in this process' memory."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_block(memory: KVMemory, block: int, computed: torch.cuda.Event | None = None) -> memoryview:
    """Return the bytes of a block: a view on the CPU, from a GPU a copy that is made after `computed`.

    It waits for the GPU, though not for steps that were queued later, and for processes that hold shares of
    the block. Do not call it on an event loop.
    """
    if memory.spread is not None:
        return memory.spread.gather_block(block)
    flat = _flat(memory, block)
    if flat.device.type == "cpu":
        return host_view(flat)
    with torch.cuda.device(flat.device), torch.cuda.stream(torch.cuda.Stream(flat.device)):
        if computed is not None:
            torch.cuda.current_stream().wait_event(computed)
        return host_view(flat.cpu())


async def fetch_block(memory: KVMemory, block: int, computed: torch.cuda.Event | None) -> memoryview:
    """Return the bytes of a block as `read_block` does, without blocking the event loop."""
    if memory.data.device.type == "cpu" and memory.spread is None:
        return read_block(memory, block)
    return await asyncio.to_thread(read_block, memory, block, computed)


def write_block(memory: KVMemory, block: int, payload: memoryview) -> None:
    """Write the bytes of a block; does not wait for a GPU.

    On a GPU the write is queued on the stream of the engine's steps: later steps see it, and a block that is
    granted anew is not written by both at once.
    """
    if memory.spread is not None:
        memory.spread.scatter_block(block, payload)
        return
    flat = _flat(memory, block)
    if flat.device.type == "cpu":
        host_view(flat)[:] = payload
    else:
        flat.copy_(torch.frombuffer(payload, dtype=torch.uint8).pin_memory(), non_blocking=True)


def _flat(memory: KVMemory, block: int) -> torch.Tensor:
    """Return one block as `[bytes_per_block]` uint8, sharing its memory."""
    return memory.blocks[block]
