"""Copies of blocks between a GPU's pool and host memory, on a stream of their own beside the steps.

**Out.** A copy begins after the steps that were queued when its block entered the prefix cache, and goes into
a slot of the RAM tier's page-locked memory (diptych/engine/kv/tiers/pinned.py), where the entry stays. The
thread that asked waits for it, and no step does.

**In.** A copy begins after the steps that are queued now: one of them may still write to the block, which
another sequence had. Its blocks are held until it is done, even where the wait is cancelled, and enter the
prefix cache then: no step reads one before.

Without page-locked slots a copy out goes through pageable memory, and one in through pages that torch locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.pinned import PageLock, PinnedEntry, PinnedSlots
from diptych.runtime.task_cancellation import to_its_end
from diptych.worker_process.block_copies import BlockCopies, Mark
from diptych.worker_process.spread_copies import SpreadCopies
from kvtransfer.transports.cuda_driver import register_page, unregister_page
from kvtransfer.transports.host_blocks import host_view

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source: the bytes of a block."""


class CopyQueue(Protocol):
    """Queue of copies beside the steps of an engine. Used by several threads at once; no call waits."""

    def mark_steps(self) -> Mark:
        """Mark the end of all steps that are queued."""
        ...

    def copy(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Queue copies, and mark their end. They begin after a mark of the steps."""
        ...


class CudaCopyQueue:
    """A stream beside the default stream of a GPU, on which engines compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device)

    def mark_steps(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._steps)
        return event

    def copy(self, copies: Sequence[Copy], after: Mark) -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if not isinstance(after, torch.cuda.Event):
                raise TypeError("a mark of another queue")
            self._stream.wait_event(after)
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done


class DeviceCopies:
    """Copies between `memory`, which is a device's, and host memory: `slots`, where there are some.

    See `BlockCopies`.
    """

    holds = False

    def __init__(self, memory: KVMemory, slots: PinnedSlots | None, queue: CopyQueue) -> None:
        self._memory, self._slots, self._queue = memory, slots, queue

    def mark(self) -> Mark:
        """Return the mark after which the blocks that are published now are computed."""
        return self._queue.mark_steps()

    def read(self, block: int, computed: Mark) -> PinnedEntry | memoryview:
        """Return a copy of a block, in a slot if one is free. It waits: do not call it on an event loop."""
        slot = None if self._slots is None else self._slots.take()
        if slot is None:
            room = torch.empty(self._memory.layout.bytes_per_block, dtype=torch.uint8)
            self._queue.copy([(room, self._memory.blocks[block])], computed).synchronize()
            return host_view(room)
        into = torch.frombuffer(slot.payload, dtype=torch.uint8)
        self._queue.copy([(into, self._memory.blocks[block])], computed).synchronize()
        return slot

    def stage(self, payload: memoryview) -> memoryview:
        """Return the bytes of a block in page-locked memory, where they may lie already. Any thread."""
        if self._slots is not None:
            if self._slots.owns(payload):
                return payload
            if (slot := self._slots.take()) is not None:
                slot.payload[:] = payload
                return slot.payload
        copy = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return host_view(copy.pin_memory() if self._memory.device.type == "cuda" else copy)

    async def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy staged payloads into blocks that the caller holds, and return when they are there."""
        copies = [
            (self._memory.blocks[block], torch.frombuffer(payload, dtype=torch.uint8))
            for block, payload in zip(blocks, payloads, strict=True)
        ]
        done = self._queue.copy(copies, self._queue.mark_steps())
        # Until then the device writes to the blocks, also where this is cancelled.
        await to_its_end(asyncio.to_thread(done.synchronize))


class CudaPageLock:
    """Page-locking for all GPUs of this process (`PageLock`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size: int) -> None:
        register_page(self._device, address, size)

    def unlock(self, address: int) -> None:
        unregister_page(self._device, address)


def page_lock(device: torch.device) -> PageLock | None:
    """Return what locks memory that copies of `device` use; None for a CPU, which has none."""
    return CudaPageLock(device) if device.type == "cuda" else None


def copies_of(memory: KVMemory, slots: PinnedSlots | None) -> BlockCopies | None:
    """Return the copies of a GPU's memory, or of one that ranks hold shares of; None for whole blocks of the
    host, which need none.
    """
    if memory.spread is not None:
        return SpreadCopies(memory, memory.spread)
    if memory.device.type == "cuda":
        return DeviceCopies(memory, slots, CudaCopyQueue(memory.device))
    return None
