"""Plan of the pages of an eager step on the host, whose arrays travel with those of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.triton.recurrent.step_states import (
    PackedStates,
    block_floats,
    state_firsts,
    state_pool,
)
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.state_cuts import page_before, page_tables, state_cuts
from kernels.state_pages import NO_PAGE, StateRuns

Ints = npt.NDArray[np.int64]
Add = Callable[..., tuple[slice, ...]]
"""Takes arrays that travel to the device together, and returns their places among all."""


@dataclass(frozen=True)
class _RunsPlan:
    """Sequences of one memory whose arrays are not on the device yet."""

    memory: KVMemory
    rows: slice
    places: tuple[slice, ...]
    """Places of pages read, pages written, starts; of chunks also of offsets, cuts and ends."""
    max_tokens: int

    def on(self, narrow: torch.Tensor) -> StateRuns:
        layout = self.memory.layout.states
        assert layout is not None
        read, written, starts, *others = (narrow[place] for place in self.places)
        offsets, cuts, ends = others or (None, None, None)
        return StateRuns(
            state_pool(self.memory),
            block_floats(layout),
            self.rows,
            read.view(-1, layout.blocks),
            written.view(-1, layout.blocks),
            starts,
            torch.zeros_like(starts),
            offsets,
            cuts,
            ends,
            self.max_tokens,
        )


@dataclass(frozen=True)
class PagePlan:
    """Pages of a step whose arrays are not on the device yet."""

    runs: tuple[_RunsPlan, ...]

    def on(self, narrow: torch.Tensor) -> PackedStates:
        """Return the pages; `narrow` are all arrays on the device, int32."""
        layout = self.runs[0].memory.layout.states
        assert layout is not None
        return PackedStates(tuple(plan.on(narrow) for plan in self.runs), state_firsts(layout))


def plan_pages(
    sequences: Sequence[SequenceStep],
    order: Sequence[int],
    spans: Sequence[slice],
    abort: AbortWords | None,
    add: Add,
) -> PagePlan | None:
    """Plan the pages of a step; None for a model without recurrent layers. `order` goes memory by memory, and
    within one from rows of one token to chunks.
    """
    if sequences[0].memory.layout.states is None:
        return None
    alike: dict[tuple[int, bool], list[int]] = {}
    for i in order:
        alike.setdefault((id(sequences[i].memory), len(sequences[i].token_ids) > 1), []).append(i)
    aborted = frozenset(i for i in order if abort is not None and abort.is_aborted(i))
    return PagePlan(
        tuple(_plan_runs(some, sequences, spans, aborted, add, chunks) for (_, chunks), some in alike.items())
    )


def _plan_runs(
    members: Sequence[int],
    sequences: Sequence[SequenceStep],
    spans: Sequence[slice],
    aborted: frozenset[int],
    add: Add,
    chunks: bool,
) -> _RunsPlan:
    steps = [sequences[i] for i in members]
    memory, rows = steps[0].memory, slice(spans[members[0]].start, spans[members[-1]].stop)
    assert memory.layout.states is not None
    blocks, each = memory.layout.states.blocks, [state_cuts(step) for step in steps]
    written = [
        None if i in aborted else cut.page for i, cuts in zip(members, each, strict=True) for cut in cuts
    ]
    arrays: list[Ints] = [
        _ints(page_tables([page_before(step) for step in steps], blocks, NO_PAGE)),
        _ints(page_tables(written, blocks, NO_PAGE)),
        _ints([step.start for step in steps]),
    ]
    counts = [len(step.token_ids) for step in steps]
    if chunks:
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        ends = [begin + cut.end for begin, cuts in zip(offsets.tolist(), each, strict=False) for cut in cuts]
        arrays += [offsets, np.cumsum([0, *map(len, each)], dtype=np.int64), _ints(ends)]
    return _RunsPlan(memory, rows, add(*arrays), max(counts))


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)
