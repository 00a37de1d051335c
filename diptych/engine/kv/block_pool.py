"""Block pool: reference counts, the free list, the prefix cache, quarantine.

Counts and ids only, never requests. At every moment each block is in exactly one of four states:

    free          on the free list; its content means nothing
    held          reference count >= 1 (it may be cached at the same time)
    cached        reference count 0, reachable by its key, reclaimed when room is needed
    quarantined   given to a writer that may still write; out of use until proof that it will not

One thread owns a pool; there are no locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from diptych.engine.kv.prefix_cache import PrefixCache


class OutOfBlocks(Exception):
    """Fewer blocks are free or evictable than were asked for. Nothing was allocated."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


class BlockMisuse(RuntimeError):
    """A caller broke the pool's rules (released twice, quarantined a shared block): a bug, never a user's
    fault.
    """


class BlockPool:
    """Bookkeeping of `num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a block pool needs at least one block")
        self.total = num_blocks
        self._refs = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._quarantine: set[int] = set()
        self._cache = PrefixCache()
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._unlisted: set[bytes] = set()
        self.distrusted = 0
        """Number of times that keys were forgotten because their content cannot be trusted."""
        self.on_released: Callable[[], None] | None = None
        """Told when blocks come back from quarantine."""
        self.on_forgotten: list[Callable[[Sequence[bytes]], None]] = []
        """Called with the keys that `forget` was given, and with none when the whole cache is cleared."""
        self.on_evicted: Callable[[bytes, int], None] | None = None
        """Called with a listed key and its block at its eviction; the block is given out after it returns."""

    # -- counts

    def available(self) -> int:
        """Blocks that `allocate` can give now: free ones and those that eviction can reclaim."""
        return len(self._free) + self._cache.evictable

    def free(self) -> int:
        """Return the number of blocks on the free list."""
        return len(self._free)

    def cached(self) -> int:
        """Return the number of blocks that have a key, held or not."""
        return len(self._cache)

    def quarantined(self) -> int:
        """Return the number of blocks out of use until their writer is known to have stopped."""
        return len(self._quarantine)

    def references(self, block: int) -> int:
        """Return the reference count of `block`."""
        return self._refs[block]

    # -- holding

    def allocate(self, count: int) -> list[int]:
        """`count` blocks held once each, evicting cached ones leaf first. Raises OutOfBlocks, all or
        nothing.
        """
        if count < 0:
            raise BlockMisuse("a negative number of blocks")
        if count > self.available():
            raise OutOfBlocks(count, self.available())
        while len(self._free) < count:
            evicted = self._cache.evict()
            if evicted is None:
                raise BlockMisuse("the cache counted more evictable blocks than it could evict")
            key, block = evicted
            if self.on_evicted is not None and key not in self._unlisted:
                self.on_evicted(key, block)
            self._note_removed(key)
            self._free.append(block)
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold each of `blocks`, which must be held already, once more."""
        for block in blocks:
            if self._refs[block] == 0:
                raise BlockMisuse(f"block {block} is not held")
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each of `blocks`; at zero a block stays cached if it has a key, else it is
        free.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise BlockMisuse(f"block {block} was released more often than held")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._cache.key_of(block) is None:
                    self._free.append(block)
                else:
                    self._cache.set_referenced(block, False)

    def writable(self, block: int) -> int | None:
        """Copy-on-write. None: held once and uncached, write in place. Else a fresh block to copy `block`
        into first.

        In the second case the caller's reference has moved from `block` to the fresh one; copy before
        anything else is allocated. Raises OutOfBlocks with nothing changed.
        """
        if self._refs[block] == 0:
            raise BlockMisuse(f"block {block} is not held")
        if self._refs[block] == 1 and self._cache.key_of(block) is None:
            return None
        (fresh,) = self.allocate(1)
        self.release([block])
        return fresh

    # -- prefix cache

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` are cached, valid until the next allocation: no block is held."""
        return sum(1 for _ in self._cache.leading(keys))

    def acquire_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest cached prefix of `keys` once more each, and return them in order."""
        blocks = list(self._cache.leading(keys))
        for block in blocks:
            self._refs[block] += 1
            if self._refs[block] == 1:
                self._cache.set_referenced(block, True)
        return blocks

    def place_of(self, key: bytes) -> tuple[int, bytes] | None:
        """Return the block under `key` and the key before it, None if it is not cached."""
        return self._cache.place_of(key)

    def is_cached(self, block: int) -> bool:
        """Return whether `block` has a key."""
        return self._cache.key_of(block) is not None

    def insert(self, block: int, key: bytes, parent: bytes, *, listed: bool = True) -> bool:
        """Enter a held, full, verified block into the cache under `key`; `parent` is the key before it, b""
        at the root.

        True if the block now has that key. False if another block has it, or if the parent is not cached
        (evicted, or cleared meanwhile): the block is then simply uncached, which is no error. A key that is
        not `listed` can be looked up, and is in no list or event of the pool.
        """
        if self._refs[block] == 0:
            raise BlockMisuse(f"block {block} is not held")
        if not key:
            raise BlockMisuse("an empty key")
        current = self._cache.key_of(block)
        if current is not None:
            if current == key:
                return True
            raise BlockMisuse(f"block {block} is cached under another key")
        if not self._cache.add(block, key, parent, referenced=True):
            return False
        if listed:
            self._note_added(key)
        else:
            self._unlisted.add(key)
        return True

    def forget(self, keys: Iterable[bytes]) -> int:
        """Uncache `keys` and everything below them (their content cannot be trusted). Returns how many
        went.
        """
        self.distrusted += 1
        keys = list(keys)
        gone = sum(self._uncache(self._cache.discard(key)) for key in keys)
        if keys:
            self._tell_forgotten(keys)
        return gone

    def clear_cache(self) -> int:
        """Uncache everything. Held blocks stay held. Returns how many keys went."""
        gone = self._uncache(self._cache.clear())
        self._tell_forgotten(())
        return gone

    def cached_keys(self) -> list[bytes]:
        """Return all listed keys that are cached, parents before children."""
        keys = self._cache.keys()
        return [key for key in keys if key not in self._unlisted]

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the listed keys added and removed since the last call.

        Net: a key is in at most one list, so their order is free.
        """
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    # -- quarantine

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Take blocks, held once and uncached, out of use: someone may still write to them."""
        blocks = list(blocks)
        if len(set(blocks)) != len(blocks):
            raise BlockMisuse("a block is named twice")
        for block in blocks:
            if self._refs[block] != 1 or self._cache.key_of(block) is not None:
                raise BlockMisuse(f"block {block} is shared and cannot be quarantined")
        for block in blocks:
            self._refs[block] = 0
            self._quarantine.add(block)

    def release_quarantined(self, blocks: Iterable[int]) -> None:
        """Free quarantined blocks: their writer has promised to stop, or is dead."""
        for block in blocks:
            if block not in self._quarantine:
                raise BlockMisuse(f"block {block} is not in quarantine")
            self._quarantine.remove(block)
            self._free.append(block)
        if self.on_released is not None:
            self.on_released()

    # -- checks

    def invariants(self) -> None:
        """Raise BlockMisuse or RuntimeError if any block is in two states or none. O(blocks): for tests and
        idle times.
        """
        self._cache.invariants()
        free = set(self._free)
        if len(free) != len(self._free):
            raise BlockMisuse("a block is free twice")
        if any(references < 0 for references in self._refs):
            raise BlockMisuse("a negative reference count")
        held = {b for b, references in enumerate(self._refs) if references > 0}
        resting = {b for b in range(self.total) if self._refs[b] == 0 and self._cache.key_of(b) is not None}
        states = (free, held, resting, self._quarantine)
        if sum(len(s) for s in states) != self.total or len(set().union(*states)) != self.total:
            raise BlockMisuse(
                f"{len(free)} free + {len(held)} held + {len(resting)} cached + "
                f"{len(self._quarantine)} quarantined are not the {self.total} blocks"
            )

    def _tell_forgotten(self, keys: Sequence[bytes]) -> None:
        for listener in self.on_forgotten:
            listener(keys)

    def _uncache(self, dropped: list[tuple[bytes, int]]) -> int:
        for key, block in dropped:
            self._note_removed(key)
            if self._refs[block] == 0:
                self._free.append(block)
        return len(dropped)

    def _note_added(self, key: bytes) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def _note_removed(self, key: bytes) -> None:
        if key in self._unlisted:
            self._unlisted.remove(key)
        elif key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None
