"""Slots of a region: none is used again before its part was read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.row_slots import RowSlots


@given(st.integers(1, 5), st.lists(st.integers(0, 6), max_size=40))
def test_a_slot_is_free_again_once_its_part_was_read(number: int, steps: list[int]) -> None:
    slots, unread, read = RowSlots(number), list[int](), 0
    for step in steps:
        if step:  # write as many as there is room for
            for _ in range(min(step, slots.free)):
                slot = slots.take()
                assert 0 <= slot < number
                assert slot not in unread
                unread.append(slot)
        elif unread:
            unread.pop(0)
            read += 1
            slots.read(read)
        assert slots.free == number - len(unread)


def test_counts_that_cannot_be_and_slots_that_are_not_free_are_refused() -> None:
    slots = RowSlots(2)
    assert [slots.take(), slots.take()] == [0, 1]
    with pytest.raises(ValueError, match="not read"):
        slots.take()
    slots.read(2)
    for parts in (1, 3):
        with pytest.raises(ValueError, match="parts are read"):
            slots.read(parts)
    with pytest.raises(ValueError, match="at least one"):
        RowSlots(0)
