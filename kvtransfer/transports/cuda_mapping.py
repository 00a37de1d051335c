"""Pools on a GPU, mapped by CUDA IPC: the handle of one dedicated allocation and the pool's offset in it.

Opened for the prefill worker's GPU, which may be the same one (then it computes in place) or a peer over
NVLink or PCIe (then one kernel a chunk copies into it). An opened handle keeps the memory alive after its
owner's death, so that a late kernel writes to memory without another owner.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Sequence

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports import cuda_driver
from kvtransfer.transports.base import Locality, Run, gpu_uuid
from kvtransfer.transports.device_blocks import NOWHERE, DigestedCopy
from kvtransfer.transports.device_pieces import DigestedPieces
from kvtransfer.transports.held_blocks import Pieces
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, FlagWord
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.share_mapping import ShareRun

_HANDLE = struct.Struct(f"<4s{cuda_driver.HANDLE_BYTES}sQ")
_KIND = b"cuda"


class CudaMapping:
    """Memory mapping of pools on one GPU."""

    def __init__(self, device: torch.device, host_id: str) -> None:
        self._device, self._host_id = device, host_id
        self._pages: dict[int, int] = {}
        self._stream: torch.cuda.Stream | None = None

    def unreachable_reason(self, writer: Locality, *, in_place: bool) -> str | None:
        """Return why a writer there cannot map the pool, None if it can.

        It must be on this host with its blocks on a GPU; to compute in place, on this very GPU.
        """
        if writer.host_id != self._host_id:
            return "on another host"
        if not writer.device:
            return "one side's blocks are on a GPU, the other's are not"
        return "on another GPU" if in_place and writer.device != gpu_uuid(self._device) else None

    def export(self, pool: PoolMemory) -> ExportedPool:
        """Return the IPC handle and the offset."""
        handle, offset = cuda_driver.export_memory(self._device, pool.memory.address)
        return ExportedPool(_HANDLE.pack(_KIND, handle, offset), [])

    def map(self, exported: ExportedPool, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Open the handle; it is closed with the last reference to the memory."""
        if len(exported.handle) != _HANDLE.size:
            raise ValueError("the decode worker's pool is not on a GPU")
        kind, handle, offset = _HANDLE.unpack(exported.handle)
        if kind != _KIND:
            raise ValueError("the decode worker's pool is not on a GPU")
        base = cuda_driver.open_memory(self._device, handle)
        opened = _Opened(base + offset, layout.bytes_per_block * num_blocks)
        weakref.finalize(opened, _close, self._device, base)
        flat = torch.as_tensor(opened, device=self._device)
        if flat.data_ptr() != base + offset:
            raise ValueError("torch made a copy of the mapped pool")
        return KVMemory.over_tensor(layout, num_blocks, flat)

    def register_flags(self, flags: Flags) -> None:
        """Page-lock the flags for this GPU."""
        self._pages[flags.address] = cuda_driver.register_page(self._device, flags.address, flags.nbytes)

    def unregister_flags(self, flags: Flags) -> None:
        """Release the page-locked flags."""
        if self._pages.pop(flags.address, None) is not None:
            cuda_driver.unregister_page(self._device, flags.address)

    def start_copy(self, run: Run, target: KVMemory, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Launch one copy on a stream of its own, behind the computation of these blocks only."""
        stream = self._side_stream()
        copy = DigestedCopy(run.memory, run.block_ids, target, run.target_ids, run.ref, run.first)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if run.computed is not None:
                stream.wait_event(run.computed)
            copy.launch()
            page = self._pages[flag.flags.address]
            cuda_driver.write_in_stream_order(self._device, stream, page + flag.offset, flag.value)
            done = torch.cuda.Event()
            done.record(stream)

        def finish() -> list[bytes]:
            done.synchronize()
            return copy.digests()

        return finish

    def copy(self, run: Run, target: KVMemory) -> list[bytes]:
        """Copy on the side stream, and wait for it."""
        stream = self._side_stream()
        copy = DigestedCopy(run.memory, run.block_ids, target, run.target_ids, run.ref, run.first)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            copy.launch()
            stream.synchronize()
        return copy.digests()

    def start_share_copy(self, run: ShareRun, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Launch the conversion of each piece on a stream of its own, behind these blocks' computation."""
        stream = self._side_stream()
        copy = DigestedPieces(run.memory, run.block_ids, run.pieces, run.ref, run.first)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if run.computed is not None:
                stream.wait_event(run.computed)
            try:
                copy.launch(run.target, run.target_ids, run.target_pieces)
                page = self._pages[flag.flags.address]
                cuda_driver.write_in_stream_order(self._device, stream, page + flag.offset, flag.value)
            except BaseException:
                stream.synchronize()  # pieces that were launched still write
                raise
            done = torch.cuda.Event()
            done.record(stream)

        def finish() -> list[bytes]:
            done.synchronize()
            return copy.hashes()

        return finish

    def share_hashes(
        self, memory: KVMemory, block_ids: Sequence[int], pieces: Pieces, ref: GrantRef, first: int
    ) -> list[bytes]:
        """Compute the hashes on the side stream; nothing is written."""
        stream = self._side_stream()
        copy = DigestedPieces(memory, block_ids, pieces, ref, first)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            copy.launch()
            stream.synchronize()
        return copy.hashes()

    def digests(self, memory: KVMemory, block_ids: Sequence[int], ref: GrantRef, first: int) -> list[bytes]:
        """Compute the digests of blocks in the pool: the copy kernel reads them and writes nothing.

        It does not write even the same bytes: the blocks may have another owner by the time it runs.
        """
        stream = self._side_stream()
        copy = DigestedCopy(memory, block_ids, memory, [NOWHERE] * len(block_ids), ref, first)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            copy.launch()
            stream.synchronize()
        return copy.digests()

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream


class _Opened:
    """Mapped bytes as torch takes them; a tensor made of it keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _close(device: torch.device, base: int) -> None:
    # At the end of the process the driver may be unloaded already, and the mapping with it.
    with contextlib.suppress(cuda_driver.CudaError):
        cuda_driver.close_memory(device, base)
