"""Uses of a rank's memory that add up to its GPU, in a line of the log and in a heartbeat's fields."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diptych.worker_process.group.rank_memory import RankMemory, measure_rank, split_device_memory
from diptych.worker_process.group.rank_status import rank_statuses

MIB = 1 << 20
TOTAL, CONTEXT = 1000, 100


@pytest.mark.parametrize(("allocated", "left"), [(400, 175), (0, 175), (150, 175)])
def test_uses_add_up_whether_the_blocks_are_there_or_to_come(allocated: int, left: int) -> None:
    reserved = 300 + 25 + allocated
    found = split_device_memory(
        weights=300, blocks=400, allocated=allocated, reserved=reserved, free=TOTAL - CONTEXT - reserved
    )
    assert found == RankMemory(300, 400, 25, left)
    assert CONTEXT + found.weights + found.blocks + found.other + left == TOTAL


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
