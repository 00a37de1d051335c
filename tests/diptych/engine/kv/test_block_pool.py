"""The pool's bookkeeping: by example, and against a model under hypothesis' stateful machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.engine.kv.block_pool import BlockMisuse, BlockPool, OutOfBlocks


def chain(*names: str) -> list[bytes]:
    """Keys of a prompt: each stands for all names up to it."""
    return ["/".join(names[: i + 1]).encode() for i in range(len(names))]


def cache(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Allocate and cache a block for each key, held once each."""
    blocks = pool.allocate(len(keys))
    parent = b""
    for block, key in zip(blocks, keys, strict=True):
        assert pool.insert(block, key, parent)
        parent = key
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.available() == 1
    pool.release(held)
    assert pool.available() == 4
    pool.invariants()


def test_a_released_prefix_is_found_again_and_shared() -> None:
    pool = BlockPool(8)
    keys = chain("a", "b", "c")
    blocks = cache(pool, keys)
    pool.release(blocks)
    assert pool.available() == 8
    assert pool.match([*keys, b"other"]) == 3
    first, second = pool.acquire_prefix(keys[:2]), pool.acquire_prefix(keys)
    assert first == blocks[:2]
    assert second == blocks
    assert pool.references(blocks[0]) == 2
    assert pool.available() == 5
    pool.invariants()


def test_eviction_takes_the_oldest_leaf_and_never_a_parent_first() -> None:
    pool = BlockPool(4)
    old, young = chain("a", "b"), chain("x", "y")
    pool.release(cache(pool, old))
    pool.release(cache(pool, young))
    pool.drain_events()
    pool.release(pool.allocate(1))
    assert pool.drain_events() == ([], [old[1]])
    assert (pool.match(old), pool.match(young)) == (1, 2)
    pool.allocate(3)
    assert pool.cached_keys() == [young[0]] or pool.match(young) == 1
    pool.invariants()


def test_a_used_prefix_is_evicted_last() -> None:
    pool = BlockPool(4)
    old, young = chain("a", "b"), chain("x", "y")
    pool.release(cache(pool, old))
    pool.release(cache(pool, young))
    pool.release(pool.acquire_prefix(old))
    pool.allocate(2)
    assert (pool.match(old), pool.match(young)) == (2, 0)


def test_a_held_child_keeps_the_unheld_parent_and_the_count_is_right() -> None:
    pool = BlockPool(3)
    keys = chain("a", "b")
    first = cache(pool, keys[:1])
    duplicate, child = pool.allocate(2)
    assert not pool.insert(duplicate, keys[0], b"")
    assert pool.insert(child, keys[1], keys[0])
    pool.release([*first, duplicate])
    assert pool.available() == 1, "the parent rests under a held child and cannot go"
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    pool.release([child])
    assert len(pool.allocate(3)) == 3
    assert pool.cached_keys() == []
    pool.invariants()


def test_insert_without_its_parent_leaves_the_block_uncached() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert not pool.insert(block, b"child", b"gone")
    pool.release([block])
    assert pool.free() == 2


def test_copy_on_write_copies_shared_blocks_only() -> None:
    pool = BlockPool(4)
    (own,) = pool.allocate(1)
    assert pool.writable(own) is None
    pool.retain([own])
    fresh = pool.writable(own)
    assert fresh is not None
    assert fresh != own
    assert (pool.references(own), pool.references(fresh)) == (1, 1)
    pool.insert(own, b"k", b"")
    moved = pool.writable(own)
    assert moved is not None, "a cached block is never written, even with one holder"
    assert pool.match([b"k"]) == 1
    pool.invariants()


def test_events_are_net() -> None:
    pool = BlockPool(2)
    keys = chain("a", "b")
    pool.release(cache(pool, keys))
    assert pool.drain_events() == (keys, [])
    pool.allocate(1)
    assert pool.drain_events() == ([], [keys[1]])
    assert pool.clear_cache() == 1
    (block,) = pool.allocate(1)
    assert pool.insert(block, keys[0], b"")
    assert pool.drain_events() == ([], []), "removed and added again: nothing has changed for a reader"


def test_forget_takes_everything_below() -> None:
    pool = BlockPool(6)
    keys = chain("a", "b", "c")
    blocks = cache(pool, keys)
    pool.release(blocks[2:])
    assert pool.forget([keys[1]]) == 2
    assert pool.cached_keys() == keys[:1]
    assert pool.free() == 4
    pool.invariants()


def test_quarantine_counts_apart_and_refuses_shared_blocks() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.quarantine([one])
    assert (pool.quarantined(), pool.available()) == (1, 2)
    pool.retain([two])
    with pytest.raises(BlockMisuse):
        pool.quarantine([two])
    pool.insert(two, b"k", b"")
    with pytest.raises(BlockMisuse):
        pool.release([one])
    told: list[int] = []
    pool.on_released = lambda: told.append(pool.free())
    pool.release_quarantined([one])
    assert told == [pool.free()]
    with pytest.raises(BlockMisuse):
        pool.release_quarantined([one])
    assert pool.available() == 3
    pool.invariants()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, fork, write, are quarantined and go; the counts must add up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[list[int]] = []
        self.quarantined: list[int] = []
        self.known: set[bytes] = set()

    def held(self) -> list[int]:
        return [block for sequence in self.sequences for block in sequence]

    @rule(names=st.lists(st.sampled_from("ab"), min_size=1, max_size=5))
    def start(self, names: list[str]) -> None:
        keys = chain(*names)
        prefix = self.pool.acquire_prefix(keys)
        assert len(prefix) == self.pool.match(keys)
        before = self.pool.available()
        try:
            fresh = self.pool.allocate(len(keys) - len(prefix))
        except OutOfBlocks:
            assert before < len(keys) - len(prefix)
            self.pool.release(prefix)
            return
        assert not set(fresh) & set(self.held())
        assert not set(fresh) & set(self.quarantined)
        self.sequences.append(prefix + fresh)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), names=st.lists(st.sampled_from("ab"), min_size=5, max_size=5))
    def insert(self, data: st.DataObject, names: list[str]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        parent = b""
        for block, key in zip(sequence, chain(*names), strict=False):
            try:
                self.pool.insert(block, key, parent)
            except BlockMisuse:
                return  # the block is cached under another prompt's key
            parent = key

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.pool.retain(sequence)
        self.sequences.append(list(sequence))

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s]))
        position = data.draw(st.integers(0, len(sequence) - 1))
        keys = self.pool.cached_keys()
        try:
            fresh = self.pool.writable(sequence[position])
        except OutOfBlocks:
            assert self.pool.available() == 0
            return
        if fresh is not None:
            assert fresh not in self.held()
            sequence[position] = fresh
        target = sequence[position]
        assert self.held().count(target) == 1
        assert set(self.pool.cached_keys()) <= set(keys)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        for block in sequence:
            try:
                self.pool.quarantine([block])
            except BlockMisuse:
                self.pool.release([block])
            else:
                self.quarantined.append(block)

    @precondition(lambda self: self.quarantined)
    @rule()
    def writer_stopped(self) -> None:
        self.pool.release_quarantined(self.quarantined)
        self.quarantined.clear()

    @rule(clear=st.booleans(), name=st.sampled_from(["a", "b", "a/b"]))
    def uncache(self, clear: bool, name: str) -> None:
        if clear:
            self.pool.clear_cache()
            assert self.pool.cached_keys() == []
        else:
            self.pool.forget([name.encode()])
            assert self.pool.match([name.encode()]) == 0

    @rule()
    def reader_follows(self) -> None:
        added, removed = self.pool.drain_events()
        assert not self.known & set(added)
        assert self.known >= set(removed)
        self.known = (self.known | set(added)) - set(removed)
        assert self.known == set(self.pool.cached_keys())

    @invariant()
    def counts_agree(self) -> None:
        self.pool.invariants()
        held = self.held()
        assert all(self.pool.references(b) == held.count(b) for b in range(self.pool.total))
        assert self.pool.quarantined() == len(self.quarantined)
        # By our own account, not by the pool's: every block is in exactly one of five piles.
        times = Counter(held)
        shared = sum(count > 1 for count in times.values())
        resting = self.pool.cached() - sum(self.pool._cache.key_of(block) is not None for block in times)
        piles = (self.pool.free(), resting, len(times) - shared, shared, len(self.quarantined))
        assert sum(piles) == self.pool.total

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.pool.release(sequence)
        self.pool.release_quarantined(self.quarantined)
        assert self.pool.available() == self.pool.total
        assert len(set(self.pool.allocate(self.pool.total))) == self.pool.total


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
