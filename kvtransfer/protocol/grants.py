"""Grants of blocks: their allocation from the pool, and the table of open grants by slot and generation.

Slots are used again, generations never are. The rule of allocation: a grant may not take the last blocks. One
stays free for each running sequence, so that every sequence that decodes can grow by at least one block
whatever the prefills do. An attempt of several sequences waits until each of them finds a first block of its
own too, or until it is alone: more room than that never comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.messages import FirstTokens, GrantRef, Key, PendingTransfer


@dataclass(slots=True, eq=False)
class Grant:
    """Blocks granted to one writer.

    `block_ids[:cached_blocks]` are pinned blocks of the prefix cache, which the writer reads and never
    writes. `block_ids[cached_blocks:num_blocks]` are the writer's to fill: full blocks, then windowed ones
    where layers with a window have their own (window_allocator.py). The rest is reserved for growth and is
    not sent.
    """

    ref: GrantRef
    block_ids: list[int]
    cached_blocks: int
    num_blocks: int
    num_tokens: int
    """Tokens whose KV the writer must deliver."""
    reads_prefix: bool = False
    """True if the writer may read the cached prefix in this pool: its pins last as long as the writer."""
    transport: str = ""
    """Transport by which the writer fills it: only what proves the writer's end there ends a quarantine."""
    window_pins: tuple[int, ...] = ()
    """Windowed blocks of the cached prefix, pinned as it is."""
    ring: tuple[int, ...] = ()
    """Entries of the writer's ring of windowed blocks (`PromptWindow.ring`), which may name one twice."""
    first_tokens: FirstTokens = ()
    """Set by the commit; empty before."""
    note: object = None
    """Opaque value of the driver, passed from the commit to the handoff."""
    pushed_digests: dict[int, bytes] = field(default_factory=dict)
    """Digest of each block that the writer announced, by its index in the table."""
    arrived_digests: dict[int, bytes] = field(default_factory=dict)
    """Digest of each block that a copying transport delivered, by its index in the table."""

    @property
    def writable(self) -> range:
        """The indices in the table that are the writer's to fill."""
        return range(self.cached_blocks, self.num_blocks)

    def may_write(self, indices: range) -> bool:
        """Return True if all `indices` of the table are the writer's to fill."""
        return self.writable.start <= indices.start and indices.stop <= self.writable.stop

    @property
    def pinned(self) -> list[int]:
        """The blocks of the cached prefix."""
        return [*self.block_ids[: self.cached_blocks], *self.window_pins]

    @property
    def allocated(self) -> list[int]:
        """The blocks that were allocated for this grant."""
        return self.block_ids[self.cached_blocks :]

    @property
    def held(self) -> list[int]:
        """Return all blocks of the grant."""
        return [*self.block_ids, *self.window_pins]

    def all_pushed(self) -> bool:
        """Return True once the writer announced every writable block with a digest."""
        return len(self.pushed_digests) == len(self.writable)

    def all_arrived(self) -> bool:
        """Return True once a copying transport delivered every writable block."""
        return len(self.arrived_digests) == len(self.writable)

    def digests_differ(self) -> bool:
        """Return True if a block arrived with another digest than announced."""
        return self.arrived_digests != self.pushed_digests


class GrantGate(Protocol):
    """Conditions of a grant beside blocks, which the owner of the pool has in its own books."""

    def may_grant(self, key: Key) -> bool:
        """Return whether an attempt has all but its blocks; one that has not holds up no other."""
        ...

    def granted(self, key: Key) -> None:
        """Record that an attempt got its blocks; `may_grant` was true."""
        ...


Holder = TypeVar("Holder")


class GrantTable(Generic[Holder]):
    """Open grants: the holder of each slot. Generations grow over the whole table, and so over each slot."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, Holder]] = {}
        self._free: list[int] = []
        self._generation = 0

    def open(self, key: Key, holder: Holder) -> GrantRef:
        """Take a slot for `holder`; the generation is larger than any before and at least 1."""
        self._generation += 1
        slot = heapq.heappop(self._free) if self._free else len(self._slots)
        self._slots[slot] = (self._generation, holder)
        return GrantRef(key, slot, self._generation)

    def find(self, slot: int, generation: int) -> Holder | None:
        """Return the holder of the slot, None unless this very generation of it is open."""
        entry = self._slots.get(slot)
        return entry[1] if entry is not None and entry[0] == generation else None

    def close(self, ref: GrantRef) -> None:
        """Free the slot of a grant. Raises KeyError if the grant is not open."""
        if self.find(ref.slot, ref.generation) is None:
            raise KeyError(ref)
        del self._slots[ref.slot]
        heapq.heappush(self._free, ref.slot)

    def newest(self, predicate: Callable[[Holder], bool]) -> Holder | None:
        """Return the holder with the largest generation for which `predicate` is true, None without one."""
        entries = [entry for entry in self._slots.values() if predicate(entry[1])]
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
    """Number of blocks that the writer needs; the rest is reserved for growth."""
    window_pins: tuple[int, ...] = ()
    """Windowed blocks of the cached prefix."""
    ring: tuple[int, ...] = ()
    """See `Grant.ring`."""


class BlockAllocator:
    """Allocation of a pool's blocks to attempts; `running()` is the number of sequences that decode now."""

    def __init__(self, pool: BlockPool, block_size: int, running: Callable[[], int]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._running = running

    def tokens_in(self, num_blocks: int) -> int:
        """Return the number of tokens in `num_blocks` full blocks."""
        return num_blocks * self._block_size

    def blocks_needed(self, pending: PendingTransfer, chunk: int) -> int:
        """Return the number of blocks that the attempt holds, its reserve included; `chunk` as below."""
        return max(self.places_for(pending.num_tokens), pending.reserve_blocks or 0)

    def allocate(self, pending: PendingTransfer, chunk: int) -> Allocation | None:
        """Pin the cached prefix and allocate the rest; None, and nothing changed, while room is short.

        `chunk` is the most tokens that a writer in place computes at once, 0 for one that copies. Here it
        changes nothing.
        """
        # At least one token has to be computed: its logits give the first token.
        pins = self._pool.acquire_prefix(pending.keys[: (pending.num_tokens - 1) // self._block_size])
        blocks = self.blocks_needed(pending, chunk)
        fresh = blocks - len(pins)
        if not self._has_room(pending, fresh, blocks):
            self._pool.release(pins)
            return None
        return Allocation(pins + self._pool.allocate(fresh), len(pins), self.places_for(pending.num_tokens))

    @property
    def _spare_each(self) -> int:
        """Blocks that a sequence needs to go on by a block of tokens."""
        return 1

    def _has_room(self, pending: PendingTransfer, fresh: int, blocks: int) -> bool:
        """Return whether the pool can give `fresh` of an attempt's `blocks` and keep what is spare."""
        running = self._running() * self._spare_each
        spare = running
        if pending.reserve_blocks is None:
            more = (pending.sequences - 1) * self._spare_each
            spare += max(0, min(more, self._pool.total - blocks - running))
        return self._pool.available() - fresh >= spare

    def places_for(self, num_tokens: int) -> int:
        """Return the number of full blocks that so many tokens take."""
        return -(-num_tokens // self._block_size)
