"""Which grants are out: slots that are used again, generations that never are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.messages import FirstTokens, GrantRef, Key, PendingTransfer


@dataclass(slots=True, eq=False)
class Grant:
    """Blocks given to one writer.

    `block_ids[:cached_blocks]` are pins on the prefix cache, which the writer reads but never writes;
    `block_ids[cached_blocks:num_blocks]` are its to fill; what follows is reserved for growth and not told.
    """

    ref: GrantRef
    block_ids: list[int]
    cached_blocks: int
    num_blocks: int
    num_tokens: int
    """Tokens whose KV the writer must deliver."""
    first_tokens: FirstTokens = ()
    """Set by the commit."""
    note: object = None
    """The driver's; goes with the commit to the handoff."""
    declared: dict[int, bytes] = field(default_factory=dict)
    """Digest of each block that the writer announced, by place in the table."""
    received: dict[int, bytes] = field(default_factory=dict)
    """Digest of each block that a copying transport brought."""

    @property
    def due(self) -> range:
        """Places in the table that are the writer's to fill."""
        return range(self.cached_blocks, self.num_blocks)

    def owes(self, places: range) -> bool:
        """Whether all of them are the writer's to fill."""
        return self.due.start <= places.start and places.stop <= self.due.stop

    @property
    def pins(self) -> list[int]:
        """The cached prefix."""
        return self.block_ids[: self.cached_blocks]

    @property
    def fresh(self) -> list[int]:
        """The blocks that were allocated for this grant."""
        return self.block_ids[self.cached_blocks :]

    def all_declared(self) -> bool:
        """Whether every due block was announced with a digest."""
        return len(self.declared) == len(self.due)

    def all_received(self) -> bool:
        """Whether a copying transport brought every due block."""
        return len(self.received) == len(self.due)

    def contradicted(self) -> bool:
        """Whether some block arrived with another digest than announced."""
        return self.received != self.declared


Holder = TypeVar("Holder")


class GrantTable(Generic[Holder]):
    """Maps a grant's slot to its holder. Generations grow over the whole table, so over each slot too."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, Holder]] = {}
        self._free: list[int] = []
        self._generation = 0

    def open(self, key: Key, holder: Holder) -> GrantRef:
        """Take a slot; the generation is larger than any before and at least 1."""
        self._generation += 1
        slot = heapq.heappop(self._free) if self._free else len(self._slots)
        self._slots[slot] = (self._generation, holder)
        return GrantRef(key, slot, self._generation)

    def find(self, slot: int, generation: int) -> Holder | None:
        """The holder, if this very generation of the slot is open."""
        entry = self._slots.get(slot)
        return entry[1] if entry is not None and entry[0] == generation else None

    def close(self, ref: GrantRef) -> None:
        """Give the slot back. KeyError if it is not open."""
        if self.find(ref.slot, ref.generation) is None:
            raise KeyError(ref)
        del self._slots[ref.slot]
        heapq.heappush(self._free, ref.slot)

    def newest(self, wanted: Callable[[Holder], bool]) -> Holder | None:
        """The wanted holder with the largest generation."""
        entries = [entry for entry in self._slots.values() if wanted(entry[1])]
        return max(entries, key=lambda entry: entry[0])[1] if entries else None

    def __iter__(self) -> Iterator[Holder]:
        return iter([holder for _, holder in self._slots.values()])

    def __len__(self) -> int:
        return len(self._slots)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks taken from the pool, cached prefix first."""

    block_ids: list[int]
    cached_blocks: int
    writable_blocks: int
    """How many of them the writer needs; the rest is reserved for growth."""


class BlockAllocator:
    """Draws on `pool`; `running()` is the number of sequences that decode now."""

    def __init__(self, pool: BlockPool, block_size: int, running: Callable[[], int]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._running = running

    def tokens(self, num_blocks: int) -> int:
        """Tokens in full blocks."""
        return num_blocks * self._block_size

    def blocks(self, expected: PendingTransfer) -> int:
        """Blocks to hold for it, the reserve included."""
        return max(self._blocks_for(expected.num_tokens), expected.reserve_blocks or 0)

    def draw(self, expected: PendingTransfer) -> Allocation | None:
        """Pin the cached prefix and allocate the rest; None: not enough room now, nothing changed."""
        # At least one token has to be computed: its logits give the first token.
        pins = self._pool.acquire_prefix(expected.keys[: (expected.num_tokens - 1) // self._block_size])
        blocks, running = self.blocks(expected), self._running()
        fresh = blocks - len(pins)
        spare = running
        if expected.reserve_blocks is None:
            spare += max(0, min(expected.sequences - 1, self._pool.total - blocks - running))
        if self._pool.available() - fresh < spare:
            self._pool.release(pins)
            return None
        return Allocation(pins + self._pool.allocate(fresh), len(pins), self._blocks_for(expected.num_tokens))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
