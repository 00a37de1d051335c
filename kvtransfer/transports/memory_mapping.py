"""What differs between a pool in the host's memory and one on a GPU, for transports that map it.

`HostMapping` is the CPU's, and stands for a GPU in tests: with it the protocol of a pushing transport (who
may map, what is announced when, what a fence proves) runs for real. What it cannot show is what is a GPU's
own: IPC handles, the order of streams, the copy kernel. `cuda_port` has those.
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
from kvtransfer.transports.host_blocks import block_digest
from kvtransfer.transports.pool_memory import PoolMemory, map_pool

_FLAG_BYTES = 8
_COUNT_BITS = 24


@dataclass(frozen=True, slots=True)
class ExportedPool:
    """A pool as it goes to another process."""

    handle: bytes
    fds: Sequence[int]


class MemoryMapping(Protocol):
    """Pools of one kind of memory; may block, and is called off the event loop unless it says otherwise."""

    def unreachable_reason(self, writer: Locality, *, in_place: bool) -> str | None:
        """Why a writer at this place cannot map a pool of this process. On the event loop."""
        ...

    def export(self, pool: PoolMemory) -> ExportedPool:
        """What another process needs to map it. Raises OSError."""
        ...

    def map(self, exported: ExportedPool, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Another process' pool, until the last reference to it is gone. Raises OSError or ValueError."""
        ...

    def register_flags(self, flags: Flags) -> None:
        """Make the page one that `start_copy` can set. Raises OSError."""
        ...

    def unregister_flags(self, flags: Flags) -> None:
        """The page will be unmapped."""
        ...

    def start_copy(self, run: Run, target: KVMemory, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Start to copy a run to its places in `target`, then to set the flag.

        What is returned blocks until both are done and gives the digest of each block.
        """
        ...

    def digests(self, memory: KVMemory, block_ids: Sequence[int], ref: GrantRef, first: int) -> list[bytes]:
        """The digests of blocks as they are in `memory` now."""
        ...


class Flags:
    """A word for each grant in a page that both processes map: how much of it its writer has written.

    Set after the blocks, with system scope, and read before they are: by x86's order of stores and by Arm's
    release through the system calls that follow on the host, by a stream's memory operation on a GPU.
    """

    def __init__(self, fd: int, slots: int) -> None:
        """Raises OSError or ValueError."""
        self._fd = fd
        self._words = mmap.mmap(fd, _page_bytes(slots), mmap.MAP_SHARED)
        self.slots = slots

    @classmethod
    def create(cls, slots: int) -> Flags:
        """New ones, all zero. Raises OSError."""
        fd = os.memfd_create("diptych-flags", os.MFD_CLOEXEC)
        os.ftruncate(fd, _page_bytes(slots))
        return cls(fd, slots)

    @classmethod
    def open(cls, fd: int, slots: int) -> Flags:
        """Another process' page. Raises OSError, or ValueError if it is too small."""
        if os.fstat(fd).st_size < _page_bytes(slots):
            raise ValueError("the page of flags is too small")
        return cls(os.dup(fd), slots)

    @property
    def fd(self) -> int:
        """The file of the page."""
        return self._fd

    @property
    def address(self) -> int:
        """Where the page is mapped here."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._words))

    @property
    def nbytes(self) -> int:
        """Of all words."""
        return len(self._words)

    def word(self, ref: GrantRef, upto: int) -> FlagWord:
        """What says that the places before `upto` of a grant's table are written."""
        return FlagWord(self, ref.slot, ref.generation << _COUNT_BITS | upto)

    def written(self, ref: GrantRef, upto: int) -> bool:
        """Whether the writer has said so."""
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
    """Whole pages, as can be page-locked."""
    return -(-_FLAG_BYTES * slots // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class FlagWord:
    """A word to be set, and to what."""

    flags: Flags
    slot: int
    value: int

    @property
    def offset(self) -> int:
        """Bytes from the begin of the page."""
        return self.slot * _FLAG_BYTES

    def set(self) -> None:
        """From the host."""
        self.flags.store(self.slot, self.value)


class HostMapping:
    """Pools in a memfd."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def unreachable_reason(self, writer: Locality, *, in_place: bool) -> str | None:
        """It has to be a process of this host whose blocks are on the host, too."""
        if writer.host_id != self._host_id:
            return "on another host"
        return None if not writer.device else "one side's blocks are on a GPU, the other's are not"

    def export(self, pool: PoolMemory) -> ExportedPool:
        """The file itself."""
        return ExportedPool(b"memfd", [pool.file()])

    def map(self, exported: ExportedPool, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Map the file, whose size must be sealed."""
        if exported.handle != b"memfd" or not exported.fds:
            raise ValueError("the decode worker's pool is not in host memory")
        return map_pool(exported.fds[0], layout, num_blocks)

    def register_flags(self, flags: Flags) -> None:
        """They are host memory."""

    def unregister_flags(self, flags: Flags) -> None:
        """They are host memory."""

    def start_copy(self, run: Run, target: KVMemory, flag: FlagWord) -> Callable[[], list[bytes]]:
        """Copies at once, on the thread of the caller of what is returned."""

        def copy() -> list[bytes]:
            digests = []
            for index, (source, place) in enumerate(
                zip(run.block_ids, run.target_ids, strict=True), run.first
            ):
                payload = run.memory.block_bytes(source)
                digests.append(block_digest(run.ref, index, payload))
                target.block_bytes(place)[:] = damage_payload(payload)
            flag.set()
            return digests

        return copy

    def digests(self, memory: KVMemory, block_ids: Sequence[int], ref: GrantRef, first: int) -> list[bytes]:
        """xxh3 of each block where it lies."""
        return [
            block_digest(ref, first + at, memory.block_bytes(block)) for at, block in enumerate(block_ids)
        ]
