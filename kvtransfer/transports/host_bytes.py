"""The bytes of a block, for transports that send host memory: a view on the CPU, a copy from a GPU."""

from __future__ import annotations

import asyncio

import torch

from diptych.engine.kv.kv_memory import KVMemory


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
