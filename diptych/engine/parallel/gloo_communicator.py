"""The exchange of ranks that share no memory: torch.distributed's Gloo, over TCP.

Ranks of one host meet on the loopback where their CPUs are not x86-64, those of several at their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from diptych.engine.parallel.communicator import GroupBroken, exchange_rows
from diptych.engine.parallel.torch_groups import first_line, gloo_group

LOOPBACK = "127.0.0.1"
"""Address at which the ranks of a group, which run on one host, find one another."""
BUILD_S = 300.0
"""Seconds that ranks wait for one another at the start, when each imports torch on a busy machine."""
EXCHANGE_S = 300.0
"""Seconds that a rank waits for a slower one within a step: a decode worker's peers give up as late."""


class GlooCommunicator:
    """A rank's end of a Gloo group."""

    on_device = False

    def __init__(self, store: c10d.Store, rank: int, ranks: int, host: str = LOOPBACK) -> None:
        """Join the group at `store` from `host`, an address of this machine; returns when all ranks have.

        Raises GroupBroken.
        """
        self.rank, self.ranks = rank, ranks
        try:
            self._group = gloo_group(store, rank, ranks, host, BUILD_S)
        except RuntimeError as error:
            raise GroupBroken(f"rank {rank} of {ranks} found no group: {error}") from error

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        everything = own.new_empty((self.ranks, *own.shape))
        _finish(lambda: self._group.allgather([list(everything.unbind(0))], [own.contiguous()]))
        return everything

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """See `Communicator.gather`."""
        options = c10d.GatherOptions()
        options.rootRank = 0
        if self.rank != 0:
            _finish(lambda: self._group.gather([], [own.contiguous()], options))
            return None
        everything = own.new_empty((self.ranks, *own.shape))
        _finish(lambda: self._group.gather([list(everything.unbind(0))], [own.contiguous()], options))
        return everything

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """See `Communicator.all_to_all`."""
        return exchange_rows(self, own, rows, self._exchange)

    def _exchange(self, came: torch.Tensor, sent: torch.Tensor, coming: list[int], going: list[int]) -> None:
        """Exchange rows as bytes, which Gloo takes of every type; see `communicator.Exchange`."""
        row_bytes = sent.itemsize * math.prod(sent.shape[1:])
        outputs, inputs = ([count * row_bytes for count in counts] for counts in (coming, going))
        numbers = came.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)
        options = c10d.AllToAllOptions()
        _finish(lambda: self._group.alltoall_base(*numbers, outputs, inputs, options))


def _finish(start: Callable[[], c10d.Work]) -> None:
    try:
        start().wait(timedelta(seconds=EXCHANGE_S))
    except RuntimeError as error:
        raise GroupBroken(f"a rank did not answer: {first_line(error)}") from error
