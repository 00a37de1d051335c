"""Random pages of recurrent states, and runs of rows and chunks over them, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.state_pages import StateRuns


@dataclass
class Pages:
    """A memory whose blocks are dealt to pages out of order, with NaN wherever no state is."""

    memory: torch.Tensor
    block_floats: int
    first: int
    tables: torch.Tensor
    """int32 `[pages, n]`."""

    @classmethod
    def make(
        cls, count: int, floats: int, first: int, block_floats: int, device: torch.device, seed: int = 0
    ) -> Pages:
        """Lay `count` pages with random states of `floats` floats, which begin at float `first`."""
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-(first + floats) // block_floats)
        memory = torch.full((count * blocks, block_floats + 16), torch.nan)
        tables = torch.randperm(count * blocks, generator=generator).view(count, blocks)
        at = first + torch.arange(floats)
        for table in tables:
            memory[table[at // block_floats], at % block_floats] = torch.randn(floats, generator=generator)
        return cls(memory.to(device), block_floats, first, tables.int().to(device))

    def page(self, number: int, floats: int) -> torch.Tensor:
        """Return the state in a page."""
        at = self.first + torch.arange(floats, device=self.memory.device)
        return self.memory[self.tables[number].long()[at // self.block_floats], at % self.block_floats]

    def _table(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the rows of tables of these pages; -1 is none."""
        chosen = torch.tensor(pages, device=self.tables.device)
        return torch.where((chosen < 0)[:, None], -1, self.tables[chosen.clamp(min=0)])

    def _ints(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.tables.device)

    def rows(self, read: Sequence[int], written: Sequence[int]) -> StateRuns:
        """Return rows that read and write these pages: -1 is none, and who writes none is not computed."""
        return StateRuns(
            self.memory, self.block_floats, slice(0, len(read)), self._table([max(p, 0) for p in read]),
            self._table(written), self._ints([0 if page < 0 else 5 for page in read]),
            self._ints([int(page >= 0) for page in written]),
        )  # fmt: skip

    def chunks(self, sequences: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> StateRuns:
        """Return sequences (page read, cuts of (rows, page written)), with a cut more than is used."""
        cuts, offsets, ends, written, live = [0], [0], [], [], []
        for _, pieces in sequences:
            cuts.append(cuts[-1] + len(pieces))
            for rows, page in pieces:
                ends.append(rows + (ends[-1] if ends else 0))
                written.append(page)
            offsets.append(ends[-1] if ends else 0)
            live.append(int(any(page >= 0 for _, page in pieces)))
        longest = max(sum(rows for rows, _ in pieces) for _, pieces in sequences)
        read = [page for page, _ in sequences]
        return StateRuns(
            self.memory, self.block_floats, slice(0, offsets[-1]), self._table([max(p, 0) for p in read]),
            self._table([*written, -1]), self._ints([0 if page < 0 else 5 for page in read]),
            self._ints(live), self._ints(offsets), self._ints(cuts), self._ints([*ends, 0]), longest,
        )  # fmt: skip


def on_cpu(runs: StateRuns) -> StateRuns:
    """Return the same runs over a copy of their memory on the CPU."""
    moved = {name: one.cpu() for name, one in vars(runs).items() if isinstance(one, torch.Tensor)}
    return replace(runs, **{**moved, "pool": moved["pool"].clone()})


def based(runs: StateRuns) -> StateRuns:
    """Return the same runs over a memory that is found by its distance from another one."""
    anchor = torch.zeros(1, runs.pool.shape[1], device=runs.pool.device)
    base = torch.tensor([(runs.pool.data_ptr() - anchor.data_ptr()) // 4], device=runs.pool.device)
    return replace(runs, pool=anchor, base=base)
