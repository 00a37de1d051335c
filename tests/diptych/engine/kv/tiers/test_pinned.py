"""Slots of page-locked memory: lent while anything looks at them, and a tier in memory over them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.pinned import ALIGNMENT, NotPinned, PinnedEntry, PinnedSlots
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack

BLOCK = 96
FORM = EntryFormat(b"f" * 16, BLOCK)
ENTRY = FORM.entry_bytes
STRIDE = 256
KEYS = [number.to_bytes(16, "big") for number in range(1, 40)]


class Lock:
    """Page lock that notes what is locked, and fails beyond a limit."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> None:
        if size > self.limit:
            raise OSError(12, "more than this user may lock")
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]


def payload(key: bytes) -> bytes:
    return key * (BLOCK // 16)


def test_slot_is_lent_while_a_view_of_it_is_left() -> None:
    slots = PinnedSlots(3 * STRIDE, ENTRY, Lock())
    first, second, third = (slots.take() for _ in range(3))
    assert first
    assert second
    assert third
    assert slots.take() is None
    assert slots.owns(first.payload)
    part = first.payload[5:9]
    del first, second
    assert slots.free == 1, "a part of the first is still looked at"
    del part
    assert slots.free == 2
    assert not slots.owns(memoryview(bytes(ENTRY)))
    assert not slots.owns(bytes(ENTRY))


def test_payloads_are_aligned_and_slots_apart() -> None:
    slots = PinnedSlots(16 * STRIDE, ENTRY, Lock())
    taken: list[PinnedEntry] = []
    while (slot := slots.take()) is not None:
        taken.append(slot)
    begins = sorted(np.frombuffer(one.payload, np.uint8).ctypes.data for one in taken)
    assert len(taken) == slots.count == 16
    assert all(begin % ALIGNMENT == 0 for begin in begins)
    assert min(b - a for a, b in itertools.pairwise(begins)) >= ENTRY


def test_memory_is_locked_as_a_whole_and_unlocked_once() -> None:
    lock = Lock()
    slots = PinnedSlots(100 * STRIDE, ENTRY, lock)
    assert sum(lock.locked.values()) >= 100 * STRIDE
    slots.close()
    slots.close()
    assert not lock.locked


def test_limit_of_locked_memory_is_said() -> None:
    with pytest.raises(NotPinned, match="more than this user may lock"):
        PinnedSlots(1 << 20, ENTRY, Lock(limit=4096))
    with pytest.raises(NotPinned, match="less than a block takes"):
        PinnedSlots(STRIDE - 1, ENTRY, Lock())


def test_block_that_was_copied_into_a_slot_is_kept_there() -> None:
    slots = PinnedSlots(16 * STRIDE, ENTRY, Lock())
    stack = TierStack([RamTier(slots.entries * ENTRY, slots=slots)], FORM)
    slot = slots.take()
    assert slot is not None
    slot.payload[:] = payload(KEYS[0])
    stack.put(KEYS[0], b"", slot, stack.epoch)
    address = np.frombuffer(slot.payload, np.uint8).ctypes.data
    found = stack.get(KEYS[0], b"")
    assert found is not None
    assert np.frombuffer(found.payload, np.uint8).ctypes.data == address
    assert bytes(found.payload) == payload(KEYS[0])


@pytest.mark.parametrize("seed", range(4))
def test_tier_over_slots_gives_what_was_stored_and_loses_no_slot(seed: int) -> None:
    chance, slots = random.Random(seed), PinnedSlots(12 * STRIDE, ENTRY, Lock())
    tier = RamTier(slots.entries * ENTRY, slots=slots)
    stack, looking = TierStack([tier], FORM), list[memoryview]()
    for _ in range(600):
        key = chance.choice(KEYS)
        match chance.randrange(5):
            case 0 if (slot := slots.take()) is not None:
                slot.payload[:] = payload(key)
                stack.put(key, b"", slot, stack.epoch)
                del slot
            case 1:
                stack.put(key, b"", payload(key), stack.epoch)
            case 2 if (found := stack.get(key, b"")) is not None:
                assert bytes(found.payload) == payload(key)
                looking.append(found.payload)
                del found
            case 3:
                stack.forget([key])
            case _:
                assert all(bytes(view) == payload(bytes(view[:16])) for view in looking)
                del looking[: chance.randrange(4)]
        assert tier.used <= slots.entries * ENTRY
        assert slots.free >= slots.count - len(tier.items()) - len(looking)
    assert stack.damaged == 0
    looking.clear()
    stack.close()
    assert slots.free == slots.count
