"""The bytes of a block, for transports that send host memory: a view on the CPU, a copy from a GPU."""

from __future__ import annotations

import torch

from engine.kv_memory import KVMemory


def host_view(flat: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous uint8 tensor in this process' memory."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_block(memory: KVMemory, block: int) -> memoryview:
    """The bytes of a block: a view of them on the CPU; a copy from a GPU, made when its writes are done."""
    return host_view(_flat(memory, block).cpu())


def write_block(memory: KVMemory, block: int, payload: memoryview) -> None:
    """Make these the bytes of a block.

    On a GPU in the order of the caller's stream, which is the one of the engine's steps: a block that is
    granted anew is not written by both at once.
    """
    flat = _flat(memory, block)
    if flat.device.type == "cpu":
        host_view(flat)[:] = payload
    else:
        flat.copy_(torch.frombuffer(payload, dtype=torch.uint8))


def _flat(memory: KVMemory, block: int) -> torch.Tensor:
    """One block as `[bytes_per_block]` uint8, sharing its memory."""
    return memory.data[block].view(-1).view(torch.uint8)
