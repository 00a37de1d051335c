"""Random pages of recurrent states, and rows and pieces over them, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.recurrence import PieceRows, RowPages, StatePages


@dataclass
class Pages:
    """A memory whose blocks are dealt to pages out of order, with NaN wherever no state is."""

    pages: StatePages
    tables: torch.Tensor
    """int32 `[pages, n]`."""

    @classmethod
    def make(
        cls, count: int, floats: int, begin: int, block_floats: int, device: torch.device, seed: int = 0
    ) -> Pages:
        """Lay `count` pages with random states of `floats` floats, which begin at float `begin`."""
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-(begin + floats) // block_floats)
        apart = block_floats + 16
        memory = torch.full((count * blocks, apart), torch.nan)
        tables = torch.randperm(count * blocks, generator=generator).view(count, blocks)
        at = begin + torch.arange(floats)
        for table in tables:
            memory[table[at // block_floats], at % block_floats] = torch.randn(floats, generator=generator)
        made = StatePages(memory.to(device), block_floats, begin)
        return cls(made, tables.int().to(device))

    def twin(self) -> Pages:
        """Return pages on the CPU with the same content."""
        memory = self.pages.memory.cpu().clone()
        return Pages(replace(self.pages, memory=memory), self.tables.cpu())

    def table(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the rows of tables of these pages; -1 is none."""
        chosen = self.tables[torch.tensor(pages, device=self.tables.device).clamp(min=0)].clone()
        chosen[torch.tensor(pages) < 0] = -1
        return chosen

    def rows(self, read: Sequence[int], written: Sequence[int]) -> RowPages:
        """Return rows that read and write these pages."""
        return RowPages(self.table(read), self.table(written))

    def pieces(self, sequences: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> PieceRows:
        """Return sequences (page read, pieces of (rows, page written))."""
        device = self.tables.device
        firsts, offsets, written, longest = [0], [0], [], 0
        for _, pieces in sequences:
            firsts.append(firsts[-1] + len(pieces))
            longest = max(longest, sum(rows for rows, _ in pieces))
            for rows, page in pieces:
                offsets.append(offsets[-1] + rows)
                written.append(page)
        read = self.table([page for page, _ in sequences])
        ints = {"dtype": torch.int32, "device": device}
        return PieceRows(
            read, torch.tensor(firsts, **ints), torch.tensor(offsets, **ints), self.table(written), longest
        )


def on_cpu(rows: RowPages | PieceRows) -> RowPages | PieceRows:
    """Return the same rows with their tensors on the CPU."""
    moved = {name: value.cpu() for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    return replace(rows, **moved)
