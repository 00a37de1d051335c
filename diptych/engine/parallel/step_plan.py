"""The plan of a step, as rank 0 sends it to the other ranks.

Memories have numbers, which mean the same to every rank, and so do the numbers of blocks within them. Rows of
images go to every rank with the plan: each finds in them what its stage takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.planned_images import PlannedImage, follow_image, plan_image


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
    images: tuple[PlannedImage, ...]
    shift: int
    grid: npt.NDArray[np.int64] | None
    parents: tuple[int, ...] | None


class StepPlan(NamedTuple):
    """A step that all ranks compute."""

    rows: tuple[PlannedRow, ...]
    greedy: bytes
    """A byte for each row of logits, 1 where its likeliest token is wanted; empty: logits of all are."""
    taps: tuple[int, ...] | None = None
    """Layers before which the residual stream is wanted, beside the rows behind the final norm; None: neither
    is.
    """


def make_plan(
    sequences: Sequence[SequenceStep],
    number_of: Callable[[KVMemory], int],
    greedy: bytes = b"",
    taps: Sequence[int] | None = None,
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
            tuple(plan_image(image) for image in step.embeddings),
            step.shift,
            step.grid,
            None if step.parents is None else tuple(step.parents),
        )
        for step in sequences
    )
    return StepPlan(tuple(rows), greedy, None if taps is None else tuple(taps))


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
            [follow_image(image) for image in row.images],
            row.shift,
            row.grid,
            parents=row.parents,
        )
        for row in plan.rows
    ]
