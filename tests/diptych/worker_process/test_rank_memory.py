"""Uses of a rank's memory that add up to its GPU, in a line of the log and in a heartbeat's fields."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.worker_process.group import shared_memories
from diptych.worker_process.group.rank_memory import (
    RankMemory,
    measure_rank,
    share_cards,
    split_device_memory,
)
from diptych.worker_process.group.rank_status import rank_statuses
from diptych.worker_process.group.shared_memories import SharedMemories

MIB = 1 << 20
TOTAL, CONTEXT = 1000, 100


@pytest.mark.parametrize(("allocated", "left"), [(400, 175), (0, 175), (150, 175)])
def test_uses_add_up_whether_the_blocks_are_there_or_to_come(allocated: int, left: int) -> None:
    reserved = 300 + 25 + allocated
    found = split_device_memory(
        weights=300, blocks=400, allocated=allocated, reserved=reserved, free=TOTAL - CONTEXT - reserved
    )
    assert found == RankMemory(300, 400, 25, left, 400 - allocated)
    assert CONTEXT + found.weights + found.blocks + found.other + left == TOTAL


def test_ranks_on_a_card_leave_room_for_the_blocks_that_all_of_them_get() -> None:
    """Two ranks of one card: none of their blocks is there yet, and each sees the same memory free."""
    free, sizes = 900, (400, 300)
    ranks = [
        split_device_memory(weights=0, blocks=size, allocated=0, reserved=0, free=free, card="GPU-1")
        for size in sizes
    ]
    assert [rank.left for rank in ranks] == [500, 600], "the control: each counts its own alone"
    other = split_device_memory(weights=0, blocks=50, allocated=0, reserved=0, free=900, card="GPU-2")
    on_cpu = RankMemory(1, 2)
    found = share_cards([*ranks, other, on_cpu])
    assert [rank.left for rank in found] == [free - sum(sizes), free - sum(sizes), 850, None]
    assert [rank.blocks for rank in found] == [*sizes, 50, 2]


def test_ranks_whose_blocks_are_there_have_what_is_free() -> None:
    """Measure one while the other keeps memory that it gives back afterwards."""
    ranks = [
        split_device_memory(weights=0, blocks=400, allocated=400, reserved=400, free=free, card="GPU-1")
        for free in (200, 150)
    ]
    assert [rank.left for rank in share_cards(ranks)] == [150, 150]


def test_the_questions_of_a_group_count_a_shared_card_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    rank = RankMemory(0, 300, 0, 600, 300, "GPU-1")
    monkeypatch.setattr(shared_memories, "measure_rank", lambda *_: RankMemory(0, 400, 0, 500, 400, "GPU-1"))
    theirs.send(rank)
    layout = KVLayout(1, 1, 8, 16, torch.float32)
    found = SharedMemories([(0, ours)]).measure(layout, 5, 0)
    assert [one.left for one in found] == [200, 200]


def test_a_line_names_each_use() -> None:
    on_gpu = RankMemory(3 * MIB, 70 * MIB, 2 * MIB, 9 * MIB).describe()
    assert on_gpu == "MiB: weights 3, share of the KV blocks 70, recordings and buffers 2, left 9"
    on_cpu = measure_rank(torch.device("cpu"), 3 * MIB, 70 * MIB, 0)
    assert on_cpu.describe() == "MiB: weights 3, share of the KV blocks 70"


@pytest.mark.parametrize("left", [None, -5, 9])
def test_heartbeats_carry_the_memory_once_it_is_known(left: int | None) -> None:
    group: Any = SimpleNamespace(pids=[os.getpid()], remote=(), weight_bytes=[1, 2], rank_memory=())
    before = list(rank_statuses(cast(Any, group)))
    assert [(rank.weight_bytes, rank.kv_bytes, rank.HasField("left_bytes")) for rank in before] == [
        (1, 0, False),
        (2, 0, False),
    ]
    group.rank_memory = [RankMemory(1, 7), RankMemory(2, 8, 3, left)]
    _, last = rank_statuses(cast(Any, group))
    assert (last.weight_bytes, last.kv_bytes, last.other_bytes) == (2, 8, 3)
    assert last.HasField("left_bytes") == (left is not None)
    assert last.left_bytes == max(0, left or 0)
