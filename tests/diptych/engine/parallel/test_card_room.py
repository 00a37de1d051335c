"""Blocks that the cards of a group have room for: of ranks by themselves, and of ranks that share a card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.engine.device import BYTES_A_GRAPH, FEW_BYTES
from diptych.engine.parallel.card_room import CardRoom, blocks_with_room

GIB = 1 << 30
BLOCK = 1 << 20
ROOM = CardRoom("a", 80 * GIB, 70 * GIB, 10 * GIB, BLOCK)


def count(*rooms: CardRoom) -> int:
    return blocks_with_room(rooms, 0.9, recordings=10, temporaries=GIB)


def test_the_fullest_card_decides() -> None:
    alone = (62 * GIB - FEW_BYTES - 10 * BYTES_A_GRAPH - GIB) // BLOCK
    assert count(ROOM) == alone
    assert count(ROOM, replace(ROOM, card="b")) == alone
    assert count(ROOM, replace(ROOM, card="b", used=20 * GIB)) == alone - 10 * GIB // BLOCK


def test_ranks_that_share_a_card_divide_it() -> None:
    """All their shares, weights and what they reserve fit into the worker's part of the card."""
    other = replace(ROOM, used=12 * GIB, block=2 * BLOCK)
    found = count(ROOM, other)
    reserved = 2 * (FEW_BYTES + 10 * BYTES_A_GRAPH + GIB)
    taken = ROOM.used + other.used + found * 3 * BLOCK + reserved
    assert 72 * GIB - 3 * BLOCK < taken <= 72 * GIB
    assert count(ROOM, replace(other, card="b")) * 3 * BLOCK > 72 * GIB, "the control: a card each"


def test_what_is_free_bounds_all_ranks_of_a_card() -> None:
    free = [replace(ROOM, free=free) for free in (8 * GIB, 9 * GIB)]
    assert count(*free) * 2 * BLOCK <= 8 * GIB
    assert count(replace(ROOM, free=GIB)) < 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_more_ranks_of_a_card_have_less(ranks: int) -> None:
    counts = [count(*[ROOM] * n) for n in (ranks, ranks + 1)]
    assert counts[0] > counts[1]
