"""The plan of a prefill worker's GPU memory has what rank 0 of a group holds of its blocks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.kv.kv_memory import KVLayout, KVMemory, SpreadBlocks
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group.shared_memories import SharedMemories
from prefill_worker.gpu_plan import log_plan

LAYOUT = KVLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32)
BLOCKS = 100
QUARTER = KVShare(range(4), range(2))


def spread(memory: KVMemory, number: int) -> SpreadBlocks:
    raise AssertionError("no memory is made")


def group_of(held: KVShare | None) -> Any:
    memories = SharedMemories([])
    memories.add_holders([], spread, held, torch.device("cuda"))
    return SimpleNamespace(memories=memories)


@pytest.mark.parametrize(
    ("group", "divisor"),
    [(None, 1), (group_of(None), 1), (group_of(QUARTER), 4)],
    ids=["alone", "whole blocks", "shares"],
)
def test_blocks_are_those_of_rank_0(group: Any, divisor: int, caplog: pytest.LogCaptureFixture) -> None:
    memory = GpuMemory("cuda", 80 << 30, lambda: 0)
    engine = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), group=group, layout=LAYOUT, memory=memory
    )
    expected = BLOCKS * LAYOUT.bytes_per_block // divisor
    with caplog.at_level(logging.INFO):
        log_plan(cast(Any, engine), BLOCKS)
    assert memory.uses["own blocks"] == expected
    assert f"own blocks {expected >> 20}" in caplog.text
