"""The windowed blocks of the prefix cache.

A cached prefix of N places can be used if all its full blocks are there, and the windowed blocks that the
next token reads: those of the last places before N. The latter are kept where a prompt or an answer ended, as
children of the full block of their place. So a full block is never evicted before them, and where a block
is forgotten with all that continues it, they are forgotten, too.

They are kept as well where a prompt parts from an earlier one whose full blocks it shares: what two prompts
begin with, such as a system prompt, is a hit for the third.

A place's blocks follow one another below its full block, the last of them under the place's mark
(diptych/cached_windows.py). Since leaves are evicted first, a mark that is cached stands for all of them. It
alone is listed beside the keys of full blocks, so that gateways know which lengths can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.cached_windows import usable_places, window_mark
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_table import PromptWindow


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
        self._reach = groups.kept(block_size) - 1

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the places of the longest prefix that can be used, valid until the next allocation.

        `keys` are those of full blocks, in order.
        """
        return usable_places(keys, self._pool.match(keys), self._reach, self._holds)

    def acquire(self, keys: Sequence[bytes]) -> WindowHit:
        """Hold the blocks of the longest prefix that can be used once more each, and return them."""
        end = self.match(keys)
        if not end:
            return WindowHit([], [])
        wanted = [key for place in range(max(0, end - self._reach), end) for key in self._keys(keys[place])]
        return WindowHit(self._pool.acquire_prefix(keys[:end]), self._pool.acquire_prefix(wanted))

    def insert(self, blocks: Sequence[int], key: bytes) -> None:
        """Enter the held windowed blocks of one place, full and verified, whose full block has `key`.

        Those of another sequence, or without their full block, stay as they are: that is no error.
        """
        parent, keys = key, self._keys(key)
        for block, own in zip(blocks, keys, strict=True):
            self._pool.insert(block, own, parent, listed=own == keys[-1])
            parent = own

    def tail(self, keys: Sequence[bytes], cached: int, places: int) -> int:
        """Return how many of a prompt's last places its ring has to have in the end, so that `insert_shared`
        finds what it enters; 0 if the prompt shares no more than its `cached` places.
        """
        shared = self._pool.match(keys)
        return places - max(cached, shared - self._reach) if shared > cached else 0

    def insert_shared(self, window: PromptWindow, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Enter the windowed blocks before the place where a prompt parts from earlier ones, as far as its
        ring still has them.

        Args:
            window: the prompt's, held and verified.
            blocks: its full blocks, which have been entered under `keys`.
        """
        cached, end = window.cached_places, len(keys)
        shared = next((at for at in range(cached, end) if self._owns(blocks[at], keys[at])), end)
        if shared <= cached:  # or its keys end before the cached prefix does
            return
        first = max(0, shared - self._reach)
        # Others may have come or gone since the ring was made for a place to part at.
        there = set(window.lasting(first, len(blocks)))
        if there.issuperset(range(first, shared)):
            for place in range(first, shared):
                self.insert(window.blocks(place), keys[place])

    def _owns(self, block: int, key: bytes) -> bool:
        """Return whether the block under a key is this one, so that no earlier prompt has entered another."""
        found = self._pool.place_of(key)
        return found is not None and found[0] == block

    def _holds(self, mark: bytes) -> bool:
        return self._pool.place_of(mark) is not None

    def _keys(self, key: bytes) -> list[bytes]:
        """Return the keys of a place's windowed blocks, by table; the last one is its mark."""
        return [
            *(key + table.to_bytes(2, "big") for table in range(1, self._groups.tables)),
            window_mark(key),
        ]
