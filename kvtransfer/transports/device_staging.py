"""Ring slots on a GPU, for NCCL: one launch packs a message, one unpacks it, with the digests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import Run
from kvtransfer.transports.device_blocks import DigestedCopy
from kvtransfer.transports.staging import SLOTS, blocks_per_slot

_SLOT_BYTES = 32 << 20


class DeviceStaging:
    """Slots beside `memory`, on its GPU.

    A message is copied to its granted blocks on the stream of the engine's steps: should a grant end while
    the copy is queued, whatever is written to its blocks next comes after. That they were intact is known
    when the copy is done, and before the first token.
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
        nobody = GrantRef(("", 0), 0, 0)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy = DigestedCopy(self._slots, [0], self._slots, [0], nobody, 0)
            copy.launch()
            self._stream.synchronize()
            copy.digests()

    def data(self, slot: int, count: int) -> torch.Tensor:
        """The bytes of the first `count` blocks of a slot."""
        first = slot * self.blocks
        return self._slots.data[first : first + count].view(-1).view(torch.uint8)

    def pack(self, slot: int, run: Run, at: int, count: int) -> list[bytes]:
        """Beside the engine's steps, once these blocks are computed."""
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
        """Queued within one turn of the event loop."""
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
