"""Cuts of a call's rows into pieces, for scans that work on many rows at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

PIECE_ROWS = 64
"""Rows of a piece; a call's last may have fewer. Calls that begin at multiples of it give the bits that one
call with all rows gives; others differ from it by rounding.
"""


class PieceRun(NamedTuple):
    """`pieces` of `length` rows each, from row `begin` on, which are computed together."""

    begin: int
    pieces: int
    length: int

    def of(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the rows of `x`, which lie along `axis`, as two axes: `[…, pieces, length, …]`."""
        rows = x.narrow(axis, self.begin, self.pieces * self.length)
        shape = (*x.shape[:axis], self.pieces, self.length, *x.shape[axis + 1 :])
        return rows.reshape(shape)


def cut_rows(rows: int) -> list[PieceRun]:
    """Return the runs of pieces of a call with `rows` rows: all whole pieces, and what is left."""
    count, tail = divmod(rows, PIECE_ROWS)
    runs = [PieceRun(0, count, PIECE_ROWS), PieceRun(count * PIECE_ROWS, 1, tail)]
    return [run for run in runs if run.pieces and run.length]


def decay_between(total: torch.Tensor) -> torch.Tensor:
    """Return how much of row s is left at row t of a piece, `[…, t, s]`, zero for later s; `total [… t]` are
    the sums of logarithms of decays up to each row.
    """
    length = total.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    # Differences to later rows are positive, and their powers may be infinite.
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
