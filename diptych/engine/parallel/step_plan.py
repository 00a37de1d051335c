"""The plan of a step, as rank 0 sends it to the other ranks.

Memories have numbers, which mean the same to every rank, and so do the numbers of blocks within them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory


class PlannedRow(NamedTuple):
    """A sequence's share of a step; see `SequenceStep` for the fields."""

    memory: int
    block_table: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    wants_logits: bool
    trailing: int
    follows: int | None
    adapter: int | None


class StepPlan(NamedTuple):
    """A step that all ranks compute."""

    rows: tuple[PlannedRow, ...]
    greedy: bytes
    """A byte for each row of logits, 1 where its likeliest token is wanted; empty: logits of all are."""


def make_plan(
    sequences: Sequence[SequenceStep], number_of: Callable[[KVMemory], int], greedy: bytes = b""
) -> StepPlan:
    """Return the plan of a step, with the blocks that it reads or writes. Raises KeyError for a memory
    without a number.
    """
    rows = (
        PlannedRow(
            number_of(step.memory),
            tuple(step.block_table[: step.memory.layout.blocks_for(step.start + len(step.token_ids))]),
            step.start,
            tuple(step.token_ids),
            step.wants_logits,
            step.trailing,
            step.follows,
            step.adapter,
        )
        for step in sequences
    )
    return StepPlan(tuple(rows), greedy)


def follow_plan(plan: StepPlan, memories: Mapping[int, KVMemory]) -> list[SequenceStep]:
    """Return the step of a plan, in this rank's memories. Raises KeyError for one that is not mapped."""
    return [
        SequenceStep(
            memories[row.memory],
            row.block_table,
            row.start,
            row.token_ids,
            row.wants_logits,
            row.trailing,
            row.follows,
            row.adapter,
        )
        for row in plan.rows
    ]
