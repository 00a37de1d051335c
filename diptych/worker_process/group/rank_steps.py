"""Steps and recordings of a rank other than 0, as rank 0 orders them."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.parallel.step_plan import StepPlan, follow_plan
from diptych.worker_process.group.orders import (
    AdapterOrder,
    PlanDecode,
    PlanPrompts,
    PrepareDecode,
    Recording,
    RecordPrompt,
)
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_memories import Memories

if TYPE_CHECKING:  # Triton is not installed everywhere
    from diptych.engine.backends.triton.parts_backend import TritonPartsBackend

    Parts = PartsBackend | NativePartsBackend | TritonPartsBackend


def carry_out(
    order: StepPlan | Recording | AdapterOrder,
    backend: Parts,
    memories: Memories,
    adapters: RankAdapters,
    plans: Connection[Any, Any],
) -> None:
    """Compute this rank's share of a step, make a recording, or place an adapter; answer where rank 0 waits
    for it.
    """
    if isinstance(order, AdapterOrder):
        adapters.carry_out(order)
    elif not isinstance(order, StepPlan):
        _record(order, backend, memories)
        plans.send_bytes(b"")
    elif backend.follow(follow_plan(order, memories.mapped), order.greedy, order.taps):
        plans.send_bytes(b"")


def _record(order: Recording, backend: Parts, memories: Memories) -> None:
    assert not isinstance(backend, (PartsBackend, NativePartsBackend)), "rank 0 has the same backend"
    match order:
        case PlanDecode(max_batch, block_size):
            backend.plan_decode(max_batch, block_size)
        case PrepareDecode(number):
            backend.prepare_decode(memories.mapped[number])
        case PlanPrompts(layout, most_tokens):
            backend.plan_prompts(layout, most_tokens)
        case RecordPrompt(number):
            backend.record_prompt(number)
