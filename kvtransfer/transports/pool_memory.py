"""Memory of the decode pool: an anonymous file that peers can map, and their mapping of it.

Or a GPU's memory.

A memfd has no name, so nothing is left in /dev/shm when processes are killed: the kernel frees it with the
last one. Its size is sealed, so that no mapping of it can fault because another process cut it short.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch.cuda.memory import _set_allocator_settings

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.transports.prefault import populate

_log = logging.getLogger(__name__)

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator, the newer name first, which wins."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Blocks and the file behind them. The file descriptor stays open as long as the process."""

    memory: KVMemory
    fd: int | None
    """File of the blocks; None where they are a GPU's memory."""

    def file(self) -> int:
        """Return the file that peers map. Raises OSError where there is none."""
        if self.fd is None:
            raise OSError(f"blocks on {self.memory.device} lie in no file")
        return self.fd


def allocate_pool(layout: KVLayout, num_blocks: int, *, prefault: bool = True) -> PoolMemory:
    """Allocate zeroed blocks that other processes can map.

    They take their memory from now on, in the background; without `prefault` each page when it is written.

    Raises OSError when the kernel refuses, ValueError for no blocks.
    """
    if num_blocks < 1:
        raise ValueError("a pool needs at least one block")
    size = layout.bytes_per_block * num_blocks
    fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        return PoolMemory(KVMemory(layout, num_blocks, _map(fd, size, prefault=prefault)), fd)
    except BaseException:
        os.close(fd)
        raise


def allocate_device_pool(layout: KVLayout, num_blocks: int, device: torch.device) -> PoolMemory:
    """Allocate zeroed blocks in one allocation of a GPU, so that a peer can map them with one handle.

    Raises torch.OutOfMemoryError, ValueError for no blocks.
    """
    if device.type != "cuda":
        return PoolMemory(KVMemory.on_device(layout, num_blocks, device), None)
    # Else the allocator might cut the pool from a larger piece that it kept, which would go with it.
    torch.cuda.empty_cache()
    with _exportable_segments():
        return PoolMemory(KVMemory.on_device(layout, num_blocks, device), None)


def allocate_share(
    layout: KVLayout, num_blocks: int, device: torch.device, *, prefault: bool = True
) -> PoolMemory:
    """Allocate zeroed blocks of one rank's own, on its device, that other processes can map.

    `layout` is that of the rank's share. Raises OSError, torch.OutOfMemoryError, ValueError for no blocks.
    """
    if device.type == "cpu":
        return allocate_pool(layout, num_blocks, prefault=prefault)
    return allocate_device_pool(layout, num_blocks, device)


def expandable_segments(variables: Mapping[str, str]) -> str | None:
    """Return the allocator's settings if they ask for expandable segments, which have no CUDA IPC handle."""
    settings = next((variables[name] for name in _ALLOCATOR_VARIABLES if variables.get(name)), "")
    return settings if _EXPANDABLE.search(settings) else None


@contextmanager
def _exportable_segments() -> Iterator[None]:
    """Have torch allocate memory that another process can map, whatever its allocator is set to."""
    if (settings := expandable_segments(os.environ)) is None:
        yield
        return
    _log.warning(
        "expandable_segments of %s is off for the KV pool: CUDA IPC cannot map such memory",
        " and ".join(name for name in _ALLOCATOR_VARIABLES if os.environ.get(name)),
    )
    # The second name is that of torch before 2.10.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or _set_allocator_settings
    change(_EXPANDABLE.sub("expandable_segments:False", settings))
    try:
        yield
    finally:
        change(settings)


def map_pool(fd: int, layout: KVLayout, num_blocks: int, *, prefault: bool = True) -> KVMemory:
    """Map another process' pool, writable; a thread unmaps it when the last reference to it is gone.

    Raises ValueError if the file is smaller than the blocks, or could become so.
    """
    size = layout.bytes_per_block * num_blocks
    if os.fstat(fd).st_size < size:
        raise ValueError(f"the pool's file is smaller than its {num_blocks} blocks")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
        raise ValueError("the size of the pool's file is not sealed")
    return KVMemory(layout, num_blocks, _map(fd, size, _PeerMapping, prefault=prefault))


class _PeerMapping(mmap.mmap):
    """Mapping of another process' pool, which a thread unmaps when its last reference is dropped.

    This process may have the last mapping of a dead decode worker's pool, and the kernel frees the pages with
    it: half a second a GiB on some machines, in which an event loop would answer no peer and be fenced
    itself. Requests and steps hold the pool, too, so that any of them may be the last.
    """

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the interpreter ends, and starts no thread
            threading.Thread(target=_drop_last, args=([self],), name="kv-unmap", daemon=True).start()


def _drop_last(held: list[_PeerMapping]) -> None:
    """Empty the list once nothing else holds the mapping: its finalizer does for a moment."""
    while sys.getrefcount(held[0]) > 2:  # of the list and of this call
        time.sleep(0.001)
    held.clear()


def _map(fd: int, size: int, kind: type[mmap.mmap] = mmap.mmap, *, prefault: bool = True) -> mmap.mmap:
    mapping = kind(fd, size, mmap.MAP_SHARED)
    # A forked child would keep the mapping after its parent was killed, and the parent's death would no
    # longer prove that no process writes.
    mapping.madvise(mmap.MADV_DONTFORK)
    if prefault:
        populate(mapping, fd)
    return mapping
