"""Pieces of blocks in one memory of this process: read, written and copied.

A piece is named by its place in the blocks of the memory's layout. The memory may have room for a share of
them only, which begins at its `origin`. Bytes of a GPU pass through page-locked host memory. What is written
there is queued on the current stream, as steps are, so that it is ordered with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import within
from diptych.engine.parallel.kv_shares import KVShare
from kvtransfer.transports.host_blocks import host_view

Pieces = Sequence[KVShare]


def read_pieces(
    memory: KVMemory, block: int, pieces: Pieces, computed: torch.cuda.Event | None = None
) -> memoryview:
    """Return the bytes of pieces of a block, one after the other: from a GPU those of after `computed`.

    It waits for the GPU, though not for steps that were queued later.
    """
    device = memory.device
    if device.type == "cpu":
        return host_view(_joined(memory, block, pieces))
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        stream = torch.cuda.current_stream()
        if computed is not None:
            stream.wait_event(computed)
        joined = _joined(memory, block, pieces)
        staged = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
        staged.copy_(joined, non_blocking=True)
        stream.synchronize()
    return host_view(staged)


def write_pieces(
    memory: KVMemory, block: int, pieces: Pieces, payload: bytes | bytearray | memoryview
) -> None:
    """Write the bytes of pieces of a block. Raises RuntimeError where they are not so many."""
    numbers = torch.frombuffer(payload, dtype=torch.uint8)
    with _current(memory.device):
        if memory.device.type != "cpu":
            numbers = numbers.pin_memory().to(memory.device, non_blocking=True)
        places = [view[block] for view in piece_views(memory, pieces)]
        for place, part in zip(places, numbers.split([p.numel() for p in places]), strict=True):
            place.copy_(part.view(place.shape))


def copy_pieces(memory: KVMemory, src: int, dst: int, pieces: Pieces) -> None:
    """Copy pieces of one block over those of another."""
    with _current(memory.device):
        for view in piece_views(memory, pieces):
            view[dst].copy_(view[src])


def piece_views(memory: KVMemory, pieces: Pieces) -> list[torch.Tensor]:
    """Return views of pieces in all blocks, uint8 `[num_blocks, layers, kinds, heads, bytes]` each."""
    layer, head = memory.origin
    held = KVShare(range(layer, layer), range(head, head))
    return [within(piece, held).of(memory.data.view(torch.uint8)) for piece in pieces]


def _joined(memory: KVMemory, block: int, pieces: Pieces) -> torch.Tensor:
    found = [view[block].flatten() for view in piece_views(memory, pieces)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the blocks' GPU current: to page-lock on another one would make a context there."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)
