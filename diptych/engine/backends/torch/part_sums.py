"""Sums of what the parts of a model give, added in float32 in the order of the parts.

    in one step    every rank gets all parts' rows and adds them: (N - 1)/N·T·P of T rows, P parts, N ranks
    in two steps   each gets all parts of its share of the rows (reduce-scatter) and adds them, and all gather
                   the sums (all-gather): (N - 1)/N·T·(P/N + 1)

Both give the same bits. Two steps are two exchanges: they pay where many bytes are saved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.row_exchange import gather_rows, parts_of_own_rows
from diptych.engine.parallel.row_shares import RowShares, share_rows
from kernels.sum_parts import sum_parts

LEAST_SAVED_BYTES = 256 << 10
"""Bytes that a rank need not get, from which a sum is made in two steps: some 0.2 ms of a 10 Gbit/s network,
about what one more exchange takes there.
"""


class PartSums:
    """Sums over the parts of all ranks of a stage."""

    def __init__(self, communicator: Communicator, parts: int) -> None:
        self._communicator, self._parts = communicator, parts

    def shares(self, rows: int) -> RowShares:
        """Return the rows that each part goes on with alone."""
        return share_rows(rows, self._parts, self._communicator.ranks)

    def of_all_rows(self, outputs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum `[T, H]` of all parts' outputs; `outputs` are those of own parts."""
        own_PTH = torch.stack(list(outputs))
        if self._saved_bytes(own_PTH[0]) >= LEAST_SAVED_BYTES:
            shares = self.shares(own_PTH.shape[1])
            return self.gather_rows(self._of_rows(own_PTH, shares), shares)
        return sum_parts(self._communicator.all_gather(own_PTH).flatten(0, 1))

    def of_own_rows(self, outputs: Iterable[torch.Tensor], shares: RowShares) -> torch.Tensor:
        """Return the sum of all parts' outputs in this rank's share of the rows."""
        return self._of_rows(torch.stack(list(outputs)), shares)

    def gather_rows(self, own: torch.Tensor, shares: RowShares) -> torch.Tensor:
        """Return the rows of all ranks, each of which has its share `[rows, H]`."""
        return gather_rows(self._communicator, own, shares)

    def _of_rows(self, own_PTH: torch.Tensor, shares: RowShares) -> torch.Tensor:
        return sum_parts(parts_of_own_rows(self._communicator, own_PTH, shares))

    def _saved_bytes(self, output: torch.Tensor) -> int:
        """Return the bytes that a rank gets less in two steps than in one."""
        ranks, parts = self._communicator.ranks, self._parts
        return output.nbytes * (ranks - 1) * (parts - parts // ranks - 1) // ranks
