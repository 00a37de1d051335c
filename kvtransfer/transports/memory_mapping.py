"""Memory mapping of a pool, for transports that map it: in host memory here, on a GPU in `cuda_mapping`.

`HostMapping` is the CPU's, and stands for a GPU in tests: with it the protocol of the cuda_ipc transport
(which writer may map, what is announced when, what a fence proves) runs for real. It cannot show what only a
GPU has: IPC handles, the order of streams, the copy kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import Locality, Run
from kvtransfer.transports.failpoints import damage_payload
from kvtransfer.transports.held_blocks import Pieces, read_pieces, write_pieces
from kvtransfer.transports.host_blocks import block_digest
from kvtransfer.transports.pool_memory import PoolMemory, map_pool
from kvtransfer.transports.rank_data import share_hash
from kvtransfer.transports.share_mapping import ShareRun

_FLAG_BYTES = 8
_COUNT_BITS = 24


@dataclass(frozen=True, slots=True)
class ExportedPool:
    """Handle of a pool for another process."""

    handle: bytes
    fds: Sequence[int]
    owner: object = None
    """Object that keeps the files open, where the process does not."""


class MemoryMapping(Protocol):
    """Mapping of pools of one kind of memory. All calls but the first may block: not on the event loop."""

    def unreachable_reason(self, writer: Locality, *, in_place: bool) -> str | None:
        """Return why a writer there cannot map a pool of this process, None if it can. On the event loop."""
        ...

    def export(self, pool: PoolMemory) -> ExportedPool:
        """Return the handle by which another process maps the pool. Raises OSError."""
        ...

    def map(self, exported: ExportedPool, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Map another process' pool, until the last reference to it is gone. Raises OSError or ValueError."""
        ...

    def register_flags(self, flags: Flags) -> None:
        """Make the page one that `start_copy` can set. Raises OSError."""
        ...

    def unregister_flags(self, flags: Flags) -> None:
        """Undo `register_flags` before the page is unmapped."""
        ...

    def start_copy(self, run: Run, target: KVMemory, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Start to copy a run to its blocks in `target`, then to set the flag.

        The returned call blocks until both are done and gives the digest of each block.
        """
        ...

    def copy(self, run: Run, target: KVMemory) -> list[bytes]:
        """Copy a run to its blocks in `target` and return the digest of each block that was read."""
        ...

    def digests(self, memory: KVMemory, block_ids: Sequence[int], ref: GrantRef, first: int) -> list[bytes]:
        """Compute the digests of blocks in `memory` as they are now; `first` is the index of the first."""
        ...

    def start_share_copy(self, run: ShareRun, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Start to copy shares of blocks to their places in `run.target`, then to set the flag.

        The returned call blocks until both are done and gives the hash of each block's share.
        """
        ...

    def share_hashes(
        self, memory: KVMemory, block_ids: Sequence[int], pieces: Pieces, ref: GrantRef, first: int
    ) -> list[bytes]:
        """Compute the hashes of shares of blocks in `memory` as they are now, as `start_share_copy` does."""
        ...


class Flags:
    """Words in a page that both processes map, one a grant: how many of its blocks the writer has written.

    A word is set after the blocks, with system scope, and read before they are. The order is kept on the host
    by x86's order of stores and by Arm's release through the system calls that follow, on a GPU by a stream's
    memory operation.
    """

    def __init__(self, fd: int, slots: int) -> None:
        """Map the page of file `fd`. Raises OSError or ValueError."""
        self._fd = fd
        self._words = mmap.mmap(fd, _page_bytes(slots), mmap.MAP_SHARED)
        self.slots = slots

    @classmethod
    def create(cls, slots: int) -> Flags:
        """Make new flags, all zero. Raises OSError."""
        fd = os.memfd_create("diptych-flags", os.MFD_CLOEXEC)
        os.ftruncate(fd, _page_bytes(slots))
        return cls(fd, slots)

    @classmethod
    def open(cls, fd: int, slots: int) -> Flags:
        """Map another process' page. Raises OSError, or ValueError if it is too small."""
        if os.fstat(fd).st_size < _page_bytes(slots):
            raise ValueError("the page of flags is too small")
        return cls(os.dup(fd), slots)

    @property
    def fd(self) -> int:
        """The file of the page."""
        return self._fd

    @property
    def address(self) -> int:
        """The address of the page in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._words))

    @property
    def nbytes(self) -> int:
        """Size of all words in bytes."""
        return len(self._words)

    def word(self, ref: GrantRef, upto: int) -> FlagWord:
        """Return the word that stands for: the indices before `upto` of a grant's table are written."""
        return FlagWord(self, ref.slot, ref.generation << _COUNT_BITS | upto)

    def written(self, ref: GrantRef, upto: int) -> bool:
        """Return True if the writer has set the flag for the indices before `upto`."""
        at = ref.slot * _FLAG_BYTES
        value = int.from_bytes(self._words[at : at + _FLAG_BYTES], "little")
        return value >> _COUNT_BITS == ref.generation and value & ((1 << _COUNT_BITS) - 1) >= upto

    def store(self, slot: int, value: int) -> None:
        """Set one word from the host."""
        self._words[slot * _FLAG_BYTES : (slot + 1) * _FLAG_BYTES] = value.to_bytes(_FLAG_BYTES, "little")

    def close(self) -> None:
        """Unmap the page and close its file; may be called again."""
        self._words.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _page_bytes(slots: int) -> int:
    """Return the size in whole pages, which can be page-locked."""
    return -(-_FLAG_BYTES * slots // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class FlagWord:
    """Word to be set, and its value."""

    flags: Flags
    slot: int
    value: int

    @property
    def offset(self) -> int:
        """Bytes from the begin of the page."""
        return self.slot * _FLAG_BYTES

    def set(self) -> None:
        """Set the word from the host."""
        self.flags.store(self.slot, self.value)


class HostMapping:
    """Memory mapping of pools in a memfd."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def unreachable_reason(self, writer: Locality, *, in_place: bool) -> str | None:
        """Return why a writer there is not on this host with its blocks in host memory, None if it is."""
        if writer.host_id != self._host_id:
            return "on another host"
        return None if not writer.device else "one side's blocks are on a GPU, the other's are not"

    def export(self, pool: PoolMemory) -> ExportedPool:
        """Return the file of the pool."""
        return ExportedPool(b"memfd", [pool.file()])

    def map(self, exported: ExportedPool, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Map the file, whose size must be sealed."""
        if exported.handle != b"memfd" or not exported.fds:
            raise ValueError("the decode worker's pool is not in host memory")
        return map_pool(exported.fds[0], layout, num_blocks)

    def register_flags(self, flags: Flags) -> None:
        """Do nothing: host memory needs no registration."""

    def unregister_flags(self, flags: Flags) -> None:
        """Do nothing: host memory needs no registration."""

    def start_copy(self, run: Run, target: KVMemory, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Return a call that copies on the thread of its caller."""

        def finish() -> list[bytes]:
            digests = self.copy(run, target)
            flag.set()
            return digests

        return finish

    def copy(self, run: Run, target: KVMemory) -> list[bytes]:
        """Copy on the thread of the caller."""
        digests = []
        for index, (source, block) in enumerate(zip(run.block_ids, run.target_ids, strict=True), run.first):
            payload = run.memory.block_bytes(source)
            digests.append(block_digest(run.ref, index, payload))
            target.block_bytes(block)[:] = damage_payload(payload)
        return digests

    def start_share_copy(self, run: ShareRun, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Return a call that copies on the thread of its caller."""

        def finish() -> list[bytes]:
            hashes = []
            for source, block in zip(run.block_ids, run.target_ids, strict=True):
                payload = read_pieces(run.memory, source, run.pieces)
                hashes.append(share_hash(payload))
                write_pieces(run.target, block, run.target_pieces, damage_payload(payload))
            flag.set()
            return hashes

        return finish

    def share_hashes(
        self, memory: KVMemory, block_ids: Sequence[int], pieces: Pieces, ref: GrantRef, first: int
    ) -> list[bytes]:
        """Compute the xxh3 hash of each share; grant and place are bound to it later (rank_data.py)."""
        return [share_hash(read_pieces(memory, block, pieces)) for block in block_ids]

    def digests(self, memory: KVMemory, block_ids: Sequence[int], ref: GrantRef, first: int) -> list[bytes]:
        """Compute the xxh3 digest of each block in place."""
        return [
            block_digest(ref, first + at, memory.block_bytes(block)) for at, block in enumerate(block_ids)
        ]
