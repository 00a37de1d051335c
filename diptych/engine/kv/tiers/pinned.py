"""Slots of entries in page-locked memory of this process, which a GPU copies to and from by itself.

A copy between pageable memory and a GPU goes through a buffer of the driver and holds up its caller; one of
page-locked memory runs on a stream beside the steps (CUDA C++ Programming Guide, "Page-Locked Host Memory").

    slot of 64 n bytes:  gap (48) | header (80) | payload, which begins at a multiple of 64

A slot is lent as a memoryview. It is free again when no view of it is left: neither the tier that holds the
entry, nor a copy that runs, nor a reader that checks it has to say so.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import Protocol

import numpy as np

from diptych.engine.kv.tiers.entry import HEADER_BYTES

ALIGNMENT = 64
"""Payloads begin at multiples of it."""
MOST_SPARE = 48
"""Most slots beyond those of a tier's entries: of blocks that are being copied, stored or read."""
_GAP = -HEADER_BYTES % ALIGNMENT


class NotPinned(Exception):
    """Memory that could not be page-locked. The message says why."""


class PageLock(Protocol):
    """Page-locking of memory of this process for a device."""

    def lock(self, address: int, size: int) -> None:
        """Lock `size` bytes from a page's begin on. Raises OSError."""
        ...

    def unlock(self, address: int) -> None:
        """Undo `lock`. Raises OSError."""
        ...


class PinnedEntry:
    """Slot that is lent: room for an entry, and the part of it that is the block's."""

    __slots__ = ("entry", "payload")

    def __init__(self, entry: memoryview) -> None:
        self.entry, self.payload = entry, entry[HEADER_BYTES:]


class PinnedSlots:
    """Equal slots in one piece of page-locked memory. Used by several threads at once."""

    def __init__(self, size: int, entry_bytes: int, lock: PageLock) -> None:
        """Take `size` bytes for entries of `entry_bytes` each. Raises NotPinned, with nothing taken."""
        self._entry_bytes = entry_bytes
        self._stride = -(-(_GAP + entry_bytes) // ALIGNMENT) * ALIGNMENT
        self.count = size // self._stride
        if not self.count:
            raise NotPinned(f"{size} bytes are less than a block takes, {self._stride}")
        self._lock = lock
        nbytes = -(-self.count * self._stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self._address: int = self._memory.ctypes.data
        try:
            lock.lock(self._address, nbytes)
        except OSError as error:
            raise NotPinned(f"{nbytes >> 20} MiB: {error}") from error
        self._locked = True
        self._free = deque(range(self.count))
        self._lent: set[int] = set()

    @property
    def entries(self) -> int:
        """Entries that a tier may keep, so that some slots are left for what moves."""
        return self.count - min(MOST_SPARE, self.count // 8)

    @property
    def free(self) -> int:
        """Slots that are not lent."""
        return len(self._free)

    def take(self) -> PinnedEntry | None:
        """Lend a slot with whatever bytes it has; None if none is free."""
        try:
            number = self._free.popleft()
        except IndexError:
            return None
        begin = number * self._stride + _GAP
        slot = self._memory[begin : begin + self._entry_bytes]
        self._lent.add(id(slot))
        weakref.finalize(slot, self._give_back, number, id(slot)).atexit = False
        return PinnedEntry(memoryview(slot))  # type: ignore[arg-type]

    def owns(self, view: bytes | memoryview) -> bool:
        """Return whether a view is one of a slot."""
        return isinstance(view, memoryview) and id(view.obj) in self._lent

    def close(self) -> None:
        """Unlock the memory, which stays as long as a view of it does."""
        if self._locked:
            self._locked = False
            self._lock.unlock(self._address)

    def _give_back(self, number: int, name: int) -> None:
        self._lent.discard(name)
        self._free.append(number)
