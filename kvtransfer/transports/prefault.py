"""Prefault of a pool: its pages are taken before tokens need them.

A page of a shared file takes its memory when it is first touched: a microsecond for the kernel to find and
clear it, ten where a hypervisor has to find it first. A prompt of 512 tokens of the bundled model touches
2,900 of them, which was a quarter of its prefill's time on such a machine. So a thread touches them all once,
slice after slice, from the moment that a process maps the pool. It leaves the data as it is.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from pathlib import Path

_log = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later (madvise(2)): as if each page had been written to."""
_CGROUP = Path("/sys/fs/cgroup")
_SLICE = 1 << 20
"""Bytes between two checks that the pool is still there; some milliseconds at most."""
_AT_ONCE = 1 << 20
"""Bytes up to which a pool is not worth a thread."""
_SPARE = 4
"""Memory must be available for the pool and a fourth of it, or its pages are left to first use."""


def populate(mapping: mmap.mmap, fd: int) -> threading.Thread | None:
    """Take memory for all pages of `mapping`, a writable one of all of file `fd`.

    In a thread unless it is small.

    The mapping is not kept alive, and the file is not used any more on return. Returns the thread, for
    callers that wait for it. Where the kernel cannot, or memory is short, pages come with their first use.
    """
    size = len(mapping)
    missing = size - os.fstat(fd).st_blocks * 512  # another process may have taken what it maps, too
    room = available_memory()
    if room is not None and room < missing + missing // _SPARE:
        _log.warning(
            "%d MiB of memory are available, the KV pool needs %d more: it takes pages as blocks are used",
            room >> 20,
            missing >> 20,
        )
        return None
    if size <= _AT_ONCE:
        _populate_slice(mapping, 0, size)
        return None
    thread = threading.Thread(target=_populate_all, args=(weakref.ref(mapping), size), daemon=True)
    thread.name = "kv-pages"
    thread.start()
    return thread


def available_memory() -> int | None:
    """Return the bytes that this process could take: of the machine, or of its container where that has less.

    None where neither is known.
    """
    found = [room for room in (_machine_memory("MemAvailable"), _container_memory()) if room is not None]
    return min(found, default=None)


def total_memory() -> int | None:
    """Return the bytes that the machine has, or its container where that may have less, used or not.

    None where neither is known.
    """
    found = [size for size in (_machine_memory("MemTotal"), _cgroup_bytes("memory.max")) if size is not None]
    return min(found, default=None)


def _populate_all(mapping: weakref.ref[mmap.mmap], size: int) -> None:
    # At no lower priority: a thread that runs whenever its core is idle keeps the kernel from seeing an idle
    # core, and the two threads of a step, from sharing out over two cores. Prompts took twice as long then.
    for start in range(0, size, _SLICE):
        pages = mapping()
        if pages is None or not _populate_slice(pages, start, min(_SLICE, size - start)):
            return
        del pages


def _populate_slice(mapping: mmap.mmap, start: int, size: int) -> bool:
    """Populate a slice; True if the kernel did. By ctypes, which releases the GIL; mmap.madvise keeps it."""
    anchor = ctypes.c_char.from_buffer(mapping, start)
    return bool(_madvise(ctypes.addressof(anchor), size, _POPULATE_WRITE) == 0)


def _machine_memory(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _container_memory() -> int | None:
    """Return the bytes that cgroup v2 leaves a container, seen as the root; cached files count as used."""
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return None if limit is None or used is None else limit - used


def _cgroup_bytes(file: str) -> int | None:
    try:
        return int((_CGROUP / file).read_text())
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return None


def _find_madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_madvise = _find_madvise()
