"""Static buffers of the pages of a recorded decode step, and the host's copies of them, one a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.recurrent.step_states import (
    PackedStates,
    block_floats,
    state_firsts,
    state_pool,
)
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.state_cuts import row_pages
from kernels.state_pages import NO_PAGE, StateRuns


@dataclass(frozen=True)
class _Tables:
    """Arrays of all rows, int32; rows that no sequence has are written nowhere."""

    read: torch.Tensor
    """`[rows, blocks of a page]`."""
    written: torch.Tensor
    starts: torch.Tensor
    """`[rows]`."""

    @classmethod
    def make(cls, rows: int, blocks: int, device: torch.device, *, pinned: bool = False) -> _Tables:
        """Allocate padding."""

        def absent(*size: int) -> torch.Tensor:
            return torch.full(size, NO_PAGE, dtype=torch.int32, device=device, pin_memory=pinned)

        return cls(absent(rows, blocks), absent(rows, blocks), absent(rows))


class PageBuffers:
    """Pages of the rows of decode steps of up to `rows` rows, one sequence a row.

    A recorded step cannot be aborted once it is launched: it leaves whole pages, or the process ends.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device, turns: int) -> None:
        """Allocate tables of pages of so many blocks, and `turns` copies on the host."""
        pinned, cpu = device.type == "cuda", torch.device("cpu")
        self._host = [_Tables.make(rows, blocks, cpu, pinned=pinned) for _ in range(turns)]
        self._device = _Tables.make(rows, blocks, device)
        self._live = torch.zeros(rows, dtype=torch.int32, device=device)
        self._known: list[list[tuple[list[int], list[int]]]] = [
            [([], []) for _ in range(rows)] for _ in range(turns)
        ]
        """Pages read and written that a copy has in each row."""

    def fill(self, turn: int, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> None:
        """Lay the pages of a step into one of the host's copies; the rest becomes padding.

        Pages mostly are those of the turn before: comparing lists is faster than turning them into arrays.
        """
        host, known, none = self._host[turn], self._known[turn], list[int]()
        read, written, starts = host.read.numpy(), host.written.numpy(), host.starts.numpy()
        starts[: len(sequences)] = [step.start for step in sequences]
        for row, step in enumerate(sequences):
            before, own = row_pages(step)
            if abort is not None and abort.is_aborted(row):
                own = none
            if before is not None and before != known[row][0]:
                read[row] = before
            if own != known[row][1]:
                written[row] = own or NO_PAGE
            known[row] = known[row][0] if before is None else before, own
        for row in range(len(sequences), len(known)):
            if known[row][1]:
                written[row] = NO_PAGE
                known[row] = known[row][0], none

    def clear(self, turn: int) -> None:
        """Make padding of all rows, on the host's copy and on the device."""
        self._host[turn].written.fill_(NO_PAGE)
        self._known[turn] = [([], []) for _ in self._known[turn]]
        self.upload(turn, len(self._live))

    def upload(self, turn: int, rows: int) -> None:
        """Bring the pages of the first `rows` rows to the device, in the order of the current stream."""
        for name, held in vars(self._device).items():
            held[:rows].copy_(getattr(self._host[turn], name)[:rows], non_blocking=True)

    def states(self, rows: int, memory: KVMemory) -> PackedStates:
        """Return the states of a step of so many rows over `memory`."""
        layout, held = memory.layout.states, self._device
        assert layout is not None
        runs = StateRuns(
            state_pool(memory),
            block_floats(layout),
            slice(0, rows),
            held.read[:rows],
            held.written[:rows],
            held.starts[:rows],
            self._live[:rows],
        )
        return PackedStates((runs,), state_firsts(layout))
