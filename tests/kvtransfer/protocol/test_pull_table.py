"""Pulls: what may be copied when, and which blocks count."""

from __future__ import annotations

import random

import pytest

from kvtransfer.protocol.messages import GrantRef
from kvtransfer.protocol.pull_table import Pull, PullPhase, PullTable

REF = GrantRef(("r", 1), 3, 17)


def opened(table: PullTable, first: int = 2, count: int = 3) -> tuple[Pull, list[int]]:
    settled: list[int] = []
    blocks = range(count)
    return table.open(
        REF, first, [40 + n for n in blocks], [90 + n for n in blocks], lambda: settled.append(1)
    ), settled


def test_missing_blocks_have_destinations_once() -> None:
    table = PullTable()
    pull, settled = opened(table)
    assert [pull.destination(index) for index in range(1, 6)] == [None, 90, 91, 92, None]
    pull.arrived(3)
    assert pull.destination(3) is None
    assert pull.leading == 0
    pull.arrived(2)
    assert pull.leading == 2
    pull.arrived(4)
    assert (pull.leading, pull.phase, settled) == (3, PullPhase.COMPLETE, [1])


def test_cut_pull_keeps_its_leading_blocks_and_takes_no_more() -> None:
    table = PullTable()
    pull, settled = opened(table)
    pull.arrived(2)
    pull.cut()
    assert (pull.leading, pull.phase, settled) == (1, PullPhase.CUT, [1])
    assert pull.destination(3) is None
    pull.cut()
    assert settled == [1]


def test_ended_pull_is_not_found() -> None:
    table = PullTable()
    pull, settled = opened(table)
    assert table.find(3, 17) is pull
    assert table.find(3, 16) is None
    table.end(pull)
    assert table.find(3, 17) is None
    assert pull.destination(2) is None
    assert not settled
    assert not len(table)


def test_second_pull_of_a_grant_and_one_of_no_blocks_are_refused() -> None:
    table = PullTable()
    opened(table)
    with pytest.raises(ValueError, match="second"):
        opened(table)
    with pytest.raises(ValueError, match="no blocks"):
        PullTable().open(REF, 0, [], [], lambda: None)


def test_broken_channel_cuts_what_is_open() -> None:
    table = PullTable()
    pull, settled = opened(table)
    table.cut_all()
    assert (pull.phase, settled) == (PullPhase.CUT, [1])
    table.end(pull)
    assert pull.phase is PullPhase.ENDED


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_leave_a_prefix_that_arrived(seed: int) -> None:
    rng = random.Random(seed)
    table = PullTable()
    pull, settled = opened(table, first=rng.randrange(4), count=rng.randint(1, 6))
    copied: set[int] = set()
    for _ in range(rng.randrange(12)):
        index = rng.randrange(12)
        if rng.random() < 0.1:
            pull.cut()
        elif pull.destination(index) is not None:
            assert index not in copied, "a block is copied once"
            copied.add(index)
            pull.arrived(index)
    assert set(range(pull.first, pull.first + pull.leading)) <= copied
    assert pull.first + pull.leading not in copied
    assert len(settled) == (pull.phase is not PullPhase.OPEN)
