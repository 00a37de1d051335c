"""Exchanges of rows that are dealt to the ranks of a stage (row_shares.py): to each its share, and to all.

Sizes depend on the number of rows alone, so that both can be recorded where the exchange can.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.row_shares import RowShares


def parts_of_own_rows(communicator: Communicator, own_PTH: torch.Tensor, shares: RowShares) -> torch.Tensor:
    """Return all parts of this rank's share of the rows, `[parts, rows, H]`, of all rows of its own parts.

    Raises GroupBroken.
    """
    own, _, width = own_PTH.shape
    mine = len(shares.of_ranks[communicator.rank])
    sent = [own_PTH[:, rows.start : rows.stop].flatten(0, 1) for rows in shares.of_ranks]
    came = communicator.all_to_all(sent, [own * mine] * len(sent))
    return torch.cat(came).view(len(shares.of_parts), mine, width)


def gather_rows(communicator: Communicator, own: torch.Tensor, shares: RowShares) -> torch.Tensor:
    """Return the rows of all ranks, each of which has its share `own [rows, n]`. Raises GroupBroken."""
    counts = [len(rows) for rows in shares.of_ranks]
    padded = functional.pad(own, (0, 0, 0, max(counts) - len(own)))
    every = communicator.all_gather(padded)
    return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])
