"""The windowed blocks of the prefix cache.

A cached prefix of N places can be used if all its full blocks are there, and the windowed blocks that the
next token reads: those of the last places before N. The latter are kept where a prompt or an answer ended, as
children of the full block of their place. So a full block is never evicted before them, and where a block
is forgotten with all that continues it, they are forgotten, too.

They are not listed: gateways know keys of full blocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.window_groups import WindowGroups


@dataclass(frozen=True, slots=True)
class WindowHit:
    """A cached prefix, each block of it held once more."""

    full: list[int]
    pinned: list[int]
    """Windowed blocks of its last places, place by place."""

    @property
    def blocks(self) -> list[int]:
        """Return all blocks of the prefix."""
        return self.full + self.pinned


class WindowPrefix:
    """Windowed blocks in the prefix cache of one pool."""

    def __init__(self, pool: BlockPool, groups: WindowGroups, block_size: int) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = block_size

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the places of the longest prefix that can be used, valid until the next allocation.

        `keys` are those of full blocks, in order.
        """
        end = self._pool.match(keys)
        while end:
            missing = self._last_missing(keys, self._first_read(end), end)
            if missing is None:
                return end
            end = missing  # any longer prefix that reaches back to it lacks it, too
        return 0

    def acquire(self, keys: Sequence[bytes]) -> WindowHit:
        """Hold the blocks of the longest prefix that can be used once more each, and return them."""
        end = self.match(keys)
        if not end:
            return WindowHit([], [])
        wanted = [key for place in range(self._first_read(end), end) for key in self._keys(keys[place])]
        return WindowHit(self._pool.acquire_prefix(keys[:end]), self._pool.acquire_prefix(wanted))

    def insert(self, blocks: Sequence[int], key: bytes) -> None:
        """Enter the held windowed blocks of one place, full and verified, whose full block has `key`.

        Those of another sequence, or without their full block, stay as they are: that is no error.
        """
        for block, own in zip(blocks, self._keys(key), strict=True):
            self._pool.insert(block, own, key, listed=False)

    def _first_read(self, end: int) -> int:
        return self._groups.first_read(end * self._block_size, self._block_size)

    def _last_missing(self, keys: Sequence[bytes], first: int, end: int) -> int | None:
        for place in range(end - 1, first - 1, -1):
            if any(self._pool.place_of(key) is None for key in self._keys(keys[place])):
                return place
        return None

    def _keys(self, key: bytes) -> list[bytes]:
        """Return the keys of a place's windowed blocks."""
        return [key + table.to_bytes(2, "big") for table in range(1, self._groups.tables + 1)]
