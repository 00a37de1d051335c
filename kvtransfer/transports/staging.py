"""Ring slots: blocks are packed into one, sent whole, and unpacked from another into the granted blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import Run
from kvtransfer.transports.device_blocks import DigestedCopy
from kvtransfer.transports.failpoints import damage_payload
from kvtransfer.transports.host_blocks import block_digest, host_view, read_block, write_block

SLOTS = 4
_SLOT_BYTES = 4 << 20
MAX_BLOCKS = 256
"""Number of blocks in one message, whose digests travel in its header."""


def blocks_per_slot(block_bytes: int, slot_bytes: int = _SLOT_BYTES) -> int:
    """Return the number of blocks in a slot, equal on both sides since it follows from the layout."""
    return max(1, min(MAX_BLOCKS, slot_bytes // block_bytes))


class Staging(Protocol):
    """Ring slots of one end."""

    blocks: int
    """Number of blocks that fit one slot."""

    def data(self, slot: int, count: int) -> torch.Tensor:
        """Return the bytes of the first `count` blocks of a slot, `[n]` uint8."""
        ...

    def prepare(self) -> None:
        """Do what takes long; off the event loop, before any other call but `data`."""
        ...

    def pack(self, slot: int, run: Run, at: int, count: int) -> list[bytes]:
        """Copy `count` blocks of a run, from its block `at` on, into a slot; return their digests.

        It blocks.
        """
        ...

    async def unpack(
        self,
        slot: int,
        ref: GrantRef,
        first: int,
        digests: Sequence[bytes],
        destinations: Callable[[range], Sequence[int] | None],
    ) -> bool | None:
        """Copy blocks from a slot to their destinations.

        Returns True when done, False if a block is damaged, None if the data is stale (and not copied).
        `destinations` is asked when nothing can come between the answer and the copy.
        """
        ...


class HostStaging:
    """Ring slots in host memory; blocks of a GPU pass through it. Damaged blocks are not copied."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._size = memory.layout.bytes_per_block
        self.blocks = blocks_per_slot(self._size)
        self._slots = [torch.empty(self.blocks * self._size, dtype=torch.uint8) for _ in range(SLOTS)]
        self._bytes = [host_view(slot) for slot in self._slots]

    def data(self, slot: int, count: int) -> torch.Tensor:
        """Return the bytes of the first `count` blocks of a slot, `[n]` uint8."""
        return self._slots[slot][: count * self._size]

    def prepare(self) -> None:
        """Do nothing: there is nothing to compile."""

    def pack(self, slot: int, run: Run, at: int, count: int) -> list[bytes]:
        """Copy blocks into a slot; return the digest of each, taken from its source."""
        digests = []
        for offset in range(count):
            payload = read_block(run.memory, run.block_ids[at + offset], run.computed)
            digests.append(block_digest(run.ref, run.first + at + offset, payload))
            self._block(slot, offset)[:] = damage_payload(payload)
        return digests

    async def unpack(
        self,
        slot: int,
        ref: GrantRef,
        first: int,
        digests: Sequence[bytes],
        destinations: Callable[[range], Sequence[int] | None],
    ) -> bool | None:
        """Copy blocks within one turn of the event loop, so that their grants cannot change meanwhile."""
        indices = range(first, first + len(digests))
        blocks = destinations(indices)
        if blocks is None:
            return None
        for offset, (index, block, digest) in enumerate(zip(indices, blocks, digests, strict=True)):
            payload = self._block(slot, offset)
            if block_digest(ref, index, payload) != digest:
                return False
            write_block(self._memory, block, payload)
        return True

    def _block(self, slot: int, at: int) -> memoryview:
        return self._bytes[slot][at * self._size : (at + 1) * self._size]


_SLOT_BYTES = 32 << 20


class DeviceStaging:
    """Ring slots beside `memory`, on its GPU: one launch packs a message, one unpacks it, with the digests.

    A message is copied to its granted blocks on the stream of the engine's steps: should a grant end while
    the copy is queued, the next write to its blocks comes after. Whether they were intact is known when the
    copy is done, and before the first token.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._device = memory.data.device
        self.blocks = blocks_per_slot(memory.layout.bytes_per_block, _SLOT_BYTES)
        self._slots = KVMemory.on_device(memory.layout, SLOTS * self.blocks, self._device)
        self._stream: torch.cuda.Stream | None = None

    def prepare(self) -> None:
        """Compile the kernel, which takes seconds the first time, off the event loop."""
        self._stream = torch.cuda.Stream(self._device)
        no_grant = GrantRef(("", 0), 0, 0)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy = DigestedCopy(self._slots, [0], self._slots, [0], no_grant, 0)
            copy.launch()
            self._stream.synchronize()
            copy.digests()

    def data(self, slot: int, count: int) -> torch.Tensor:
        """Return the bytes of the first `count` blocks of a slot, `[n]` uint8."""
        first = slot * self.blocks
        return self._slots.blocks[first : first + count].view(-1)

    def pack(self, slot: int, run: Run, at: int, count: int) -> list[bytes]:
        """Copy blocks beside the engine's steps, once they are computed; return the digest of each."""
        if self._stream is None:
            raise RuntimeError("not prepared")
        ids = run.block_ids[at : at + count]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if run.computed is not None:
                self._stream.wait_event(run.computed)
            copy = DigestedCopy(run.memory, ids, self._slots, self._ids(slot, count), run.ref, run.first + at)
            copy.launch()
            self._stream.synchronize()
            return copy.digests()

    async def unpack(
        self,
        slot: int,
        ref: GrantRef,
        first: int,
        digests: Sequence[bytes],
        destinations: Callable[[range], Sequence[int] | None],
    ) -> bool | None:
        """Queue the copy within one turn of the event loop, so that the grants cannot change meanwhile."""
        count = len(digests)
        blocks = destinations(range(first, first + count))
        if blocks is None:
            return None
        with torch.cuda.device(self._device):
            stream = torch.cuda.default_stream(self._device)
            with torch.cuda.stream(stream):
                copy = DigestedCopy(self._slots, self._ids(slot, count), self._memory, blocks, ref, first)
                copy.launch()
                done = torch.cuda.Event()
                done.record(stream)

        def taken() -> list[bytes]:
            done.synchronize()
            return copy.digests()

        return await asyncio.to_thread(taken) == list(digests)

    def _ids(self, slot: int, count: int) -> range:
        return range(slot * self.blocks, slot * self.blocks + count)
