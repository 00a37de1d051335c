"""Return of memory that loading takes beside the weights, while it goes on.

Model files are mapped: every page that was read counts as the process', and rows of a part lie between those
of others, in the same pages. The C library keeps what was freed between weights that stay. Both together took
as much as a rank's weights again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_EVERY = 16 << 20
"""Bytes of weights after which memory is returned: the least piece beside which that costs no time."""


class LoadingMemory:
    """Memory of one process that reads model files."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Watch the pages of `files`. What a process wrote to its own copy of one would be lost: none may."""
        self._files, self._read = files, 0

    def took(self, size: int) -> None:
        """Count `size` bytes of weights that were read, and return the rest from time to time."""
        self._read += size
        if self._read >= _EVERY:
            self.give_back()

    def give_back(self) -> None:
        """Return pages of the mapped files, which are read again where they are used, and free heap."""
        self._read = 0
        libc = ctypes.CDLL(None)
        for begin, end in mapped_at(self._files):
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
        if hasattr(libc, "malloc_trim"):  # glibc's
            libc.malloc_trim(0)


def mapped_at(files: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Yield where this process has mapped `files`, by addresses; nothing where the kernel does not say."""
    paths, maps = {str(file.resolve()) for file in files}, Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, *_, path = line.split(maxsplit=5)
        if path in paths:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield begin, end
