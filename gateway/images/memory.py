"""Memory of running requests' images in a gateway: their pixels, and the files that are fetched for them.

One bound for all requests and models (`--image-memory-mib`). What does not fit is refused with IMAGE_MEMORY,
so that callers try again: nothing waits while it holds a part of what others wait for.
"""

from __future__ import annotations

import threading

from diptych.runtime.errors import ImageMemory


class HeldMemory:
    """Count of bytes within a bound; used by the event loop, by threads that fetch, and by finalizers."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        # A finalizer may run in the middle of a call on the same thread.
        self._lock = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """Bytes that are taken."""
        return self._held_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes that are about to be held. Raises ImageMemory where they do not fit."""
        with self._lock:
            if self._held_bytes + num_bytes > self._max_bytes:
                raise ImageMemory()
            self._held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes that are held no more."""
        with self._lock:
            self._held_bytes -= num_bytes


class ByteBudget:
    """Bytes that the downloads of a request may have together; used by several threads.

    They count in the memory of all requests until the budget is closed.
    """

    def __init__(self, num_bytes: int, memory: HeldMemory | None = None) -> None:
        """Allow `num_bytes` bytes, which count in `memory` when they are taken."""
        self._left = num_bytes
        self._memory = memory
        self._taken = 0
        self._closed = False
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes; False where the request may not have so many. Raises ImageMemory."""
        with self._lock:
            if self._closed or num_bytes > self._left:
                return False
            if self._memory is not None:
                self._memory.take(num_bytes)
            self._left -= num_bytes
            self._taken += num_bytes
            return True

    def close(self) -> None:
        """Give back what was taken, and allow no more: a thread may still read for a caller that has left."""
        with self._lock:
            if not self._closed and self._memory is not None:
                self._memory.release(self._taken)
            self._closed = True
