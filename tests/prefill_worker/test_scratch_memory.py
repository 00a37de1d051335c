"""The size of scratch, and the words of its refusals."""

from __future__ import annotations

import logging

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout
from prefill_worker.scratch_memory import Memory, ScratchDoesNotFit, ScratchPlan, plan_scratch

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
CONTEXT = 2048
BLOCKS = CONTEXT // 16
MIB_A_CONTEXT = BLOCKS * LAYOUT.bytes_per_block >> 20
AUTO = ("shared_memory", "tcp")


def plan(
    configured: int = 0, transports: tuple[str, ...] = AUTO, free: int | None = None, total: int | None = None
) -> ScratchPlan:
    memory = Memory(None if free is None else free << 20, None if total is None else total << 20)
    return plan_scratch(configured, transports, LAYOUT, CONTEXT, memory)


def test_plenty_of_memory_holds_two_contexts() -> None:
    assert plan(free=100_000) == ScratchPlan(2 * BLOCKS, AUTO)
    assert plan() == ScratchPlan(2 * BLOCKS, AUTO), "the memory of this machine is not known"


def test_half_of_the_free_memory_is_the_most_beyond_one_context() -> None:
    assert plan(free=3 * MIB_A_CONTEXT) == ScratchPlan(BLOCKS + BLOCKS // 2, AUTO)


def test_little_memory_holds_one_context() -> None:
    assert plan(free=MIB_A_CONTEXT) == ScratchPlan(BLOCKS, AUTO)


def test_worker_that_computes_in_place_needs_no_scratch() -> None:
    assert plan(transports=("shared_memory",), free=0) == ScratchPlan(0, ("shared_memory",))


def test_copying_worker_without_room_is_refused_with_the_flag() -> None:
    with pytest.raises(ScratchDoesNotFit) as refused:
        plan(transports=("tcp",), free=MIB_A_CONTEXT - 1)
    assert str(refused.value) == (
        f"--transport tcp: one prompt of 2048 tokens takes {MIB_A_CONTEXT} MiB in the blocks that copies "
        f"start from, and {MIB_A_CONTEXT - 1} MiB are free: lower --max-model-len"
    )


def test_worker_without_room_for_copies_still_computes_in_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan(free=MIB_A_CONTEXT - 1) == ScratchPlan(0, ("shared_memory",))
    assert "lower --max-model-len" in caplog.text


def test_configured_scratch_below_one_context_is_refused_with_the_least() -> None:
    with pytest.raises(ScratchDoesNotFit) as refused:
        plan(BLOCKS - 1)
    assert str(refused.value) == (
        "--scratch-blocks 127: they hold 2032 tokens, and a prompt may have 2048 (--max-model-len): "
        "128 blocks are the least"
    )
    assert plan(BLOCKS) == ScratchPlan(BLOCKS, AUTO)


def test_configured_scratch_beyond_the_machine_is_refused_with_both_sizes() -> None:
    with pytest.raises(ScratchDoesNotFit) as refused:
        plan(4 * BLOCKS, total=2 * MIB_A_CONTEXT)
    assert str(refused.value) == (
        f"--scratch-blocks 512: they take {4 * MIB_A_CONTEXT} MiB, and there are {2 * MIB_A_CONTEXT}"
    )


def test_memory_of_the_cpu_is_read_from_the_machine() -> None:
    memory = Memory.of(torch.device("cpu"))
    assert memory.free is not None
    assert memory.total is not None
    assert 0 < memory.free <= memory.total
