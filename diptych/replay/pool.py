"""The blocks of a decode worker, counted: own blocks of streams, and prefixes that outlive them.

A prefix is a chain of chunks, each of `chunk_blocks` blocks, named by an id that stands for all tokens up to
its end. Chunks without a user stay until their blocks are needed; the one that was left longest ago goes
first, and of a chain its end, as in `diptych.engine.kv.block_pool`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

OnChange = Callable[[int, bool], None]
"""Receives a chunk's id, and whether it came or went."""


class Pool:
    """Blocks of one decode worker.

    Args:
        blocks: how many there are.
        chunk_blocks: blocks of one chunk of a prefix.
        on_change: is called when a chunk becomes cached, and when it is evicted.
    """

    def __init__(
        self, blocks: int, chunk_blocks: int, on_change: OnChange = lambda chunk, came: None
    ) -> None:
        self.total = self._free = blocks
        self._chunk_blocks = chunk_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._on_change = on_change

    @property
    def available(self) -> int:
        """Blocks that are free, or that an eviction would free."""
        return self._free + len(self._idle) * self._chunk_blocks

    def cached(self, chain: Sequence[int]) -> int:
        """Return how many leading chunks of a chain are here."""
        count = 0
        for chunk in chain:
            if chunk not in self._users:
                break
            count += 1
        return count

    def available_beside(self, chain: Sequence[int]) -> int:
        """Return the blocks that are available once the chunks of `chain`, all here, are in use."""
        return self.available - self._chunk_blocks * sum(chunk in self._idle for chunk in chain)

    def take(self, blocks: int) -> None:
        """Take blocks, evicting what is needed. Raises ValueError for more than are available."""
        if blocks > self.available:
            raise ValueError(f"{blocks} blocks are more than the {self.available} that are available")
        self._free -= blocks
        while self._free < 0:
            chunk, _ = self._idle.popitem(last=False)
            del self._users[chunk]
            self._free += self._chunk_blocks
            self._on_change(chunk, False)

    def give_back(self, blocks: int) -> None:
        """Give a stream's own blocks back."""
        self._free += blocks

    def use(self, chain: Sequence[int]) -> None:
        """Keep chunks, all of them here, from eviction until `leave`."""
        for chunk in chain:
            self._users[chunk] += 1
            self._idle.pop(chunk, None)

    def leave(self, chain: Sequence[int]) -> None:
        """End a use of chunks."""
        for chunk in reversed(chain):
            self._users[chunk] -= 1
            if not self._users[chunk]:
                self._idle[chunk] = None

    def publish(self, chunk: int) -> bool:
        """Make blocks of a stream a chunk that it uses; False if the same one is here already."""
        if chunk in self._users:
            return False
        self._users[chunk] = 1
        self._on_change(chunk, True)
        return True

    def invariants(self, own_blocks: int) -> None:
        """Raise AssertionError unless all blocks are accounted for, `own_blocks` of them by streams."""
        chunks = len(self._users) * self._chunk_blocks
        assert self._free >= 0, "more blocks are taken than there are"
        assert self._free + chunks + own_blocks == self.total, "blocks are lost or were given back twice"
        assert all(not self._users[chunk] for chunk in self._idle), "a chunk in use may be evicted"
