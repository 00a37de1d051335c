"""Recurrent states of a step on the device: the pages of its sequences, and where in a page a layer's lie.

The kernels of a layer change states where they lie. A step that cannot be aborted once it is launched, as
recorded decode steps are, leaves whole pages. One that is aborted or fails between layers leaves pages of no
count: a sequence that would go on from them fails by that (kernels/state_pages.py), as from states of other
tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.state_layout import StateLayout
from diptych.engine.state_cuts import LOST_ROWS
from kernels.state_pages import NO_PAGE, StateRuns

_FLOAT = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerStates:
    """States of one layer."""

    runs: tuple[StateRuns, ...]
    """Sequences of the step, decode rows before chunks within a memory; their rows cover the step."""
    firsts: tuple[int, ...]
    """Float of a page at which each tensor of `RecurrentShape.states` begins."""


@dataclass(frozen=True)
class PackedStates:
    """States of all layers."""

    runs: tuple[StateRuns, ...]
    firsts: Mapping[int, tuple[int, ...]]
    """Floats of a page, as in `LayerStates`, by recurrent layer."""

    def of_layer(self, layer: int) -> LayerStates:
        """Return those of a layer."""
        return LayerStates(self.runs, self.firsts[layer])

    def begin(self, operators: Operators) -> None:
        """Compare the counts of pages, before the first layer."""
        for runs in self.runs:
            operators.begin_states(runs)

    def end(self, operators: Operators, hidden: torch.Tensor) -> None:
        """Write the counts of pages, behind the last layer; rows of `hidden [T, H]` that read other states
        than those before them become NaN.
        """
        for runs in self.runs:
            operators.end_states(runs, hidden[runs.rows])

    def abort_rows(self, rows: slice) -> None:
        """Let the sequence with these rows of the step write no pages from the next launch on."""
        for runs in self.runs:
            if runs.rows.start <= rows.start < runs.rows.stop:
                begin, end = rows.start - runs.rows.start, rows.stop - runs.rows.start
                if runs.ends is None:
                    runs.written[begin:end] = NO_PAGE
                else:
                    own = (runs.ends > begin) & (runs.ends <= end)
                    runs.written.masked_fill_(own.unsqueeze(1), NO_PAGE)

    def log_lost(self) -> None:
        """Log which rows of a step, which is done, read states of another count of tokens."""
        for runs in self.runs:
            last, there = runs.written[:, 0], runs.live == 0
            if runs.cuts is not None:
                there = there & (runs.cuts[1:] > runs.cuts[:-1])
                last = last[(runs.cuts[1:] - 1).clamp(min=0).long()]
            if lost := (there & (last[: len(there)] >= 0)).nonzero().flatten().tolist():
                begin = runs.rows.start
                rows = [begin + (one if runs.offsets is None else int(runs.offsets[one])) for one in lost]
                _log.error(LOST_ROWS, rows)


def state_firsts(layout: StateLayout) -> dict[int, tuple[int, ...]]:
    """Return the floats of a page at which the states of each layer begin."""
    begins, found = layout.extents(), {}
    for layer, shapes in layout.layers:
        sizes = [math.prod(shape) for shape in shapes]
        offsets = accumulate(sizes, initial=begins[layer][0] // _FLOAT)
        found[layer] = tuple(offset for offset, _ in zip(offsets, sizes, strict=False))
    return found


def state_pool(memory: KVMemory) -> torch.Tensor:
    """Return the blocks of a memory as float32 `[blocks, floats of a block]`."""
    return memory.blocks.view(torch.float32)


def block_floats(layout: StateLayout) -> int:
    """Return the floats of a block that a page uses."""
    return layout.block_bytes // _FLOAT
