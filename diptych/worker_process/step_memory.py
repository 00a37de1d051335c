"""Memory of a GPU that steps with chunks take beside weights and blocks, in one process or in ranks."""

from __future__ import annotations

from diptych.engine.backends.triton.activations import activation_bytes
from diptych.engine.backends.triton.parts_activations import parts_activation_bytes
from diptych.engine.backends.triton.step_plan import gathered_bytes
from diptych.engine.parallel.parts import deal_parts, parts_of_rank
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.worker_process.loaded_engine import LoadedEngine


def chunk_bytes(engine: LoadedEngine, tokens: int) -> int:
    """Return the bytes that steps of up to `tokens` tokens take while they are computed: in a group those of
    the rank that takes most.
    """
    shape, dtype = engine.model.shape, engine.model.dtype
    if engine.parts == 1:
        return activation_bytes(shape, tokens, dtype) + gathered_bytes(shape, dtype)
    dealt = deal_parts(shape, engine.parts, whole_experts=engine.whole_experts, all_to_all=engine.all_to_all)
    grid = Grid(1) if engine.group is None else engine.group.grid
    sizes = []
    for stage in deal_stages(shape, grid.stages):
        for rank in range(grid.ranks):
            own = [dealt[number] for number in parts_of_rank(len(dealt), rank, grid.ranks)]
            shapes = [part.shape_of(stage.shape_of(shape)) for part in own]
            # One part after the other gathers its keys and values.
            gathered = max(gathered_bytes(one, dtype) for one in shapes)
            buffers = parts_activation_bytes(shapes, len(dealt), tokens, dtype, sends_rows=engine.all_to_all)
            sizes.append(gathered + buffers)
    return max(sizes)
