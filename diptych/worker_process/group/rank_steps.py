"""Steps and recordings of a rank other than 0, as rank 0 orders them."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.backends.triton.cuda_graph import CaptureFailed
from diptych.engine.parallel.step_plan import StepPlan, follow_plan
from diptych.worker_process.group.orders import (
    AdapterOrder,
    DropRecording,
    PlanDecode,
    PlanPrompts,
    RecordDecode,
    Recording,
    RecordPrompt,
    UseDecode,
)
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_memories import Memories

if TYPE_CHECKING:  # Triton is not installed everywhere
    from diptych.engine.backends.triton.parts_backend import TritonPartsBackend

    Parts = PartsBackend | NativePartsBackend | TritonPartsBackend


def carry_out(
    order: StepPlan | Recording | DropRecording | AdapterOrder,
    backend: Parts,
    memories: Memories,
    adapters: RankAdapters,
    plans: Connection[Any, Any],
) -> None:
    """Compute this rank's share of a step, make or drop a recording, or place an adapter; answer where rank 0
    waits for it.
    """
    if isinstance(order, AdapterOrder):
        adapters.carry_out(order)
    elif isinstance(order, DropRecording):
        _drop(order, _recording(backend))
    elif not isinstance(order, StepPlan):
        plans.send_bytes(_record(order, _recording(backend), memories).encode())
    elif backend.follow(follow_plan(order, memories.mapped), order.greedy, order.taps):
        plans.send_bytes(b"")


def _recording(backend: Parts) -> TritonPartsBackend:
    assert not isinstance(backend, (PartsBackend, NativePartsBackend)), "rank 0 has the same backend"
    return backend


def _record(order: Recording, backend: TritonPartsBackend, memories: Memories) -> str:
    """Make a recording, or what it needs; return why it cannot be captured, empty if it is."""
    try:
        match order:
            case PlanDecode(max_batch, block_size):
                backend.plan_decode(max_batch, block_size)
            case UseDecode(number):
                backend.use_decode(memories.mapped[number])
            case RecordDecode():
                backend.record_decode(order.recording)
            case PlanPrompts(layout, most_tokens):
                backend.plan_prompts(layout, most_tokens)
            case RecordPrompt(number):
                backend.record_prompt(number)
    except CaptureFailed as error:
        return str(error) or repr(error)
    return ""


def _drop(order: DropRecording, backend: TritonPartsBackend) -> None:
    match order.order:
        case RecordDecode(recording):
            backend.drop_decode(recording, order.why)
        case RecordPrompt(number):
            backend.drop_prompt(number, order.why)
