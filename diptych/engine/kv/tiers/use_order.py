"""Order in which a tier's entries leave: the least recently used chain first, and of a chain its end first.

A block without the blocks before it is of no use. So a use of a block counts as one of all before it, and
among equals the deepest leaves first. Times are whole seconds: a prompt touches a
chain once, not once a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Use:
    parent: bytes
    depth: int
    at: int


class UseOrder:
    """Keys with their parents, by last use. Not for several threads at once, but for `parent_of`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}
        self._heap: list[tuple[int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._uses)

    def parent_of(self, key: bytes) -> bytes | None:
        """Return the parent of a key (b"" at a root), None for an unknown key."""
        use = self._uses.get(key)
        return None if use is None else use.parent

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return every key with its parent."""
        return [(key, use.parent) for key, use in self._uses.items()]

    def add(self, key: bytes, parent: bytes, at: float | None = None) -> None:
        """Add a key that is used now, or was `at` that time by the clock."""
        above = self._uses.get(parent)
        self._uses[key] = _Use(parent, above.depth + 1 if above else 1, -1)
        self.touch(key, at)

    def touch(self, key: bytes, at: float | None = None) -> None:
        """Count a use of a key and of those before it."""
        second = int(self._clock() if at is None else at)
        while (use := self._uses.get(key)) is not None and use.at < second:
            use.at = second
            heapq.heappush(self._heap, (second, -use.depth, key))
            key = use.parent
        if len(self._heap) > 4 * len(self._uses) + 64:
            self._heap = [(use.at, -use.depth, key) for key, use in self._uses.items()]
            heapq.heapify(self._heap)

    def remove(self, key: bytes) -> None:
        """Remove a key, if it is there."""
        self._uses.pop(key, None)

    def oldest(self) -> bytes | None:
        """Return the key that is to leave next, None without any. It stays until it is removed."""
        while self._heap:
            at, depth, key = self._heap[0]
            use = self._uses.get(key)
            if use is not None and (use.at, -use.depth) == (at, depth):
                return key
            heapq.heappop(self._heap)  # used again since, or gone
        return None
