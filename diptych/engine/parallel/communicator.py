"""The exchange between the ranks of a group: three verbs, which every rank calls in the same order.

Nothing is added up on the way. A library's all-reduce adds in an order of its own, which changes with the
number of ranks; here every rank gets all numbers and adds them in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class GroupBroken(RuntimeError):
    """A rank is gone, or did not answer in time: the group cannot compute any more."""


class Communicator(Protocol):
    """End of a group that one rank holds."""

    rank: int
    ranks: int

    @property
    def on_device(self) -> bool:
        """True if an exchange is queued on the device's current stream, and may be recorded in a CUDA graph.

        The host does not wait for other ranks then: it can neither order what comes later by an exchange, nor
        see what they wrote before it.
        """
        ...

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return `[ranks, *own.shape]`: every rank's tensor, all of one shape. Raises GroupBroken."""
        ...

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return the same on rank 0, None on the others. Raises GroupBroken."""
        ...

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Return what every rank has for this one: `[rows, ...]` each. `own` has a tensor for each rank.

        All are of one type and differ in their first size alone. `rows` are the sizes that come, where they
        are known: else they are exchanged first, where that is needed. Raises GroupBroken.
        """
        ...


class Alone:
    """The group of one rank."""

    rank = 0
    ranks = 1
    on_device = True

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return `own` with an axis of ranks."""
        return own.unsqueeze(0)

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return `own` with an axis of ranks."""
        return own.unsqueeze(0)

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Return `own`."""
        return list(own)


def rows_to_come(communicator: Communicator, own: Sequence[torch.Tensor]) -> list[int]:
    """Return the rows that each rank has for this one in an `all_to_all`. Raises GroupBroken."""
    counts = torch.tensor([len(one) for one in own], dtype=torch.int64, device=own[0].device)
    coming: list[int] = communicator.all_gather(counts)[:, communicator.rank].tolist()
    return coming


Exchange = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], None]
"""`(came, sent, rows from each rank, rows to each rank)`: fills `came [rows, ...]` with what others sent."""


def exchange_rows(
    communicator: Communicator, own: Sequence[torch.Tensor], rows: Sequence[int] | None, exchange: Exchange
) -> list[torch.Tensor]:
    """Return what `Communicator.all_to_all` does, by a library's `exchange` of rows in a row.

    Raises GroupBroken.
    """
    coming = rows_to_come(communicator, own) if rows is None else list(rows)
    sent = torch.cat(list(own)).contiguous()
    came = sent.new_empty((sum(coming), *sent.shape[1:]))
    exchange(came, sent, coming, [len(one) for one in own])
    return list(came.split(coming))
