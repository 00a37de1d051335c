"""Plan of a prefill worker's GPU memory beside weights: graphs, the numbers of a step, its own blocks."""

from __future__ import annotations

import logging

from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.recurrent_model import held_state_bytes
from diptych.worker_process.step_memory import chunk_bytes

_log = logging.getLogger(__name__)


def plan_steps(engine: LoadedEngine, chunk: int, prompts: int) -> int:
    """Plan the memory of steps of up to `chunk` tokens of `prompts` prompts, recorded ones included, and
    return its bytes; on a CPU 0.
    """
    if engine.model.device.type == "cpu":
        return 0
    size = chunk_bytes(engine, chunk)
    engine.memory.plan_graphs(engine.runner.recorded_prompts)
    states = held_state_bytes(engine.model, engine.layout, prompts=prompts, tokens=chunk)
    engine.memory.plan("prompts", size)
    engine.memory.plan("recurrent states of a step", states)
    return size + states


def log_plan(engine: LoadedEngine, blocks: int) -> None:
    """Log the uses of a GPU's memory, with `blocks` of the worker's own, or rank 0's share of them;
    nothing on a CPU.
    """
    if engine.model.device.type == "cpu":
        return
    layout = engine.layout if engine.group is None else engine.group.memories.own_layout(engine.layout)
    engine.memory.plan("own blocks", blocks * layout.bytes_per_block)
    if (plan := engine.memory.describe(None)) is not None:
        _log.info("%s", plan)
