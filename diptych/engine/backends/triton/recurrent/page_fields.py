"""Fields of the pages of recorded prompt steps, among the static input of such a step (prompt_buffers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from diptych.engine.kv.state_layout import StateLayout
from diptych.engine.state_cuts import page_before, page_tables, state_cuts
from kernels.state_pages import NO_PAGE, StateRuns

_READ, _WRITTEN, _STARTS, _OFFSETS = "pages_read", "pages_written", "page_starts", "page_offsets"
_CUTS, _ENDS, _BASE, _LIVE = "page_cuts", "page_ends", "page_base", "page_live"


class PageFields:
    """Fields of up to `tokens` tokens of up to `sequences` sequences."""

    def __init__(self, tokens: int, sequences: int, block_size: int, layout: StateLayout) -> None:
        """Count fields of pages of `layout`."""
        self._layout, self._sequences = layout, sequences
        self._most_cuts = tokens // block_size + 3 * sequences

    def sizes(self) -> dict[str, tuple[npt.DTypeLike, int]]:
        """Return each field's type and numbers."""
        sequences, cuts, blocks = self._sequences, self._most_cuts, self._layout.blocks
        return {
            _BASE: (np.int64, 1),
            _READ: (np.int32, sequences * blocks),
            _WRITTEN: (np.int32, cuts * blocks),
            _STARTS: (np.int32, sequences),
            _OFFSETS: (np.int32, sequences + 1),
            _CUTS: (np.int32, sequences + 1),
            _ENDS: (np.int32, cuts),
            _LIVE: (np.int32, sequences),
        }

    def clear(self, host: Mapping[str, npt.NDArray[Any]]) -> None:
        """Make padding of all: sequences without tokens."""
        for name in self.sizes():
            host[name][:] = NO_PAGE if name == _WRITTEN else 0

    def fill(
        self,
        host: Mapping[str, npt.NDArray[Any]],
        sequences: Sequence[SequenceStep],
        abort: AbortWords | None,
        anchor: KVMemory,
    ) -> None:
        """Lay a step over one memory into the host's copy."""
        blocks, count, row, cut = self._layout.blocks, len(sequences), 0, 0
        for number, step in enumerate(sequences):
            aborted, found = abort is not None and abort.is_aborted(number), state_cuts(step)
            host[_READ][number * blocks :][:blocks] = page_tables([page_before(step)], blocks, NO_PAGE)
            pages = [None if aborted else one.page for one in found]
            host[_WRITTEN][cut * blocks :][: len(found) * blocks] = page_tables(pages, blocks, NO_PAGE)
            host[_STARTS][number] = step.start
            host[_ENDS][cut:][: len(found)] = [row + one.end for one in found]
            row, cut = row + len(step.token_ids), cut + len(found)
            host[_OFFSETS][number + 1], host[_CUTS][number + 1] = row, cut
        host[_STARTS][count:] = 0
        host[_OFFSETS][count + 1 :], host[_CUTS][count + 1 :] = row, cut
        distance = sequences[0].memory.data.data_ptr() - anchor.data.data_ptr()
        host[_BASE][0] = distance // torch.float32.itemsize

    def states(
        self, of: Callable[[str], torch.Tensor], tokens: int, sequences: int, anchor: KVMemory
    ) -> PackedStates:
        """Return the states of a step of so many tokens and sequences, whose fields on the device `of`
        returns.
        """
        blocks = self._layout.blocks
        runs = StateRuns(
            state_pool(anchor),
            block_floats(self._layout),
            slice(0, tokens),
            of(_READ).view(-1, blocks)[:sequences],
            of(_WRITTEN).view(-1, blocks),
            of(_STARTS)[:sequences],
            of(_LIVE)[:sequences],
            of(_OFFSETS)[: sequences + 1],
            of(_CUTS)[: sequences + 1],
            of(_ENDS),
            tokens,
            of(_BASE),
        )
        return PackedStates((runs,), state_firsts(self._layout))
