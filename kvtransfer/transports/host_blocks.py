"""The digest of one pushed block: xxh3-128 over the grant, the block's place in it, and the bytes.

The name of the grant comes first, so that a block of another request, of an earlier generation, or from
another place in the same table is caught like a flipped bit. It guards against faults, not against forgers.
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


def block_digest(ref: GrantRef, index: int, payload: bytes | bytearray | memoryview) -> bytes:
    """16 bytes that bind `payload` to block `index` of the grant's table."""
    request_id, attempt = ref.key
    name = request_id.encode()
    hasher = xxhash.xxh3_128(_PLACE.pack(ref.slot, ref.generation, attempt, index, len(name)))
    hasher.update(name)
    hasher.update(payload)
    return hasher.digest()


def host_view(flat: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous uint8 tensor in this process' memory."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_block(memory: KVMemory, block: int, computed: torch.cuda.Event | None = None) -> memoryview:
    """The bytes of a block: a view of them on the CPU; from a GPU a copy, made once `computed` has come.

    That waits for the GPU, though not for steps that were queued later: it is none of an event loop's calls.
    """
    flat = _flat(memory, block)
    if flat.device.type == "cpu":
        return host_view(flat)
    with torch.cuda.device(flat.device), torch.cuda.stream(torch.cuda.Stream(flat.device)):
        if computed is not None:
            torch.cuda.current_stream().wait_event(computed)
        return host_view(flat.cpu())


async def fetch_block(memory: KVMemory, block: int, computed: torch.cuda.Event | None) -> memoryview:
    """`read_block` for event loops."""
    if memory.data.device.type == "cpu":
        return read_block(memory, block)
    return await asyncio.to_thread(read_block, memory, block, computed)


def write_block(memory: KVMemory, block: int, payload: memoryview) -> None:
    """Make these the bytes of a block; does not wait for a GPU.

    There it is queued on the stream of the engine's steps: those that come later see it, and a block that is
    granted anew is not written by both at once.
    """
    flat = _flat(memory, block)
    if flat.device.type == "cpu":
        host_view(flat)[:] = payload
    else:
        flat.copy_(torch.frombuffer(payload, dtype=torch.uint8).pin_memory(), non_blocking=True)


def _flat(memory: KVMemory, block: int) -> torch.Tensor:
    """One block as `[bytes_per_block]` uint8, sharing its memory."""
    return memory.data[block].view(-1).view(torch.uint8)
