"""The way of rows to the ranks of their experts and back, in sizes that the host counts or in fixed ones.

Of T rows, N ranks and K experts a row, of which k ranks have some, this comes to a rank:

    counted  T·(k + K)/N rows: once for each rank that has an expert of a row, and an output for each expert.
             The host waits for the counts
    whole    T·(1 + K)·(N - 1)/N rows: all, and from each rank K for each row that it sent. Sizes depend on T
             alone, so that a step can be recorded

Rows that came lie in the order of the step either way, filled up to T: products have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.parts import Part, experts_of_ranks
from diptych.engine.parallel.row_exchange import gather_rows
from diptych.engine.parallel.row_shares import RowShares

_NONE = -1
"""Expert of a row that is none."""


class ExpertRanks:
    """Numbers of the experts that each rank of a stage has, in a row."""

    def __init__(self, parts: Sequence[Part], communicator: Communicator, device: torch.device) -> None:
        """Take all parts of the model, whose experts are dealt whole."""
        self.communicator = communicator
        self.spans = experts_of_ranks(parts, communicator.ranks)
        # On the device: a recorded step copies nothing from the host.
        self._ends = torch.tensor([span.stop for span in self.spans], device=device)

    def here(self, experts: torch.Tensor, rank: int) -> torch.Tensor:
        """Return which of some experts a rank has, bool `[...]`."""
        span = self.spans[rank]
        return (experts >= span.start) & (experts < span.stop)

    def holders(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the rank that has each of some experts, int64 `[...]`."""
        return torch.bucketize(experts.long(), self._ends, right=True)


class RowTrip(Protocol):
    """Rows of a layer with experts, on their way."""

    rows: torch.Tensor
    """`[T, H]`: rows that came to this rank, in the order of the step, and any numbers behind them."""
    experts: torch.Tensor
    """`[T, K]`: their experts, of which this rank computes those that it has."""

    def bring_back(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of own rows' experts `[rows * K, H]`, in the order of pairs, of `outputs [T * K,
        H]` that each rank has for the rows that came. Raises GroupBroken.
        """
        ...


class CountedTrip:
    """Trip in sizes that the host counts."""

    def __init__(
        self, ranks: ExpertRanks, own: torch.Tensor, experts: torch.Tensor, shares: RowShares
    ) -> None:
        """Send this rank's rows `own [rows, H]` to the ranks of their `experts [rows, K]`.

        Raises GroupBroken.
        """
        self._communicator = ranks.communicator
        every = range(self._communicator.ranks)
        self._chosen = [ranks.here(experts, rank) for rank in every]
        going = [torch.where(chosen.any(dim=1))[0] for chosen in self._chosen]
        numbers = self._communicator.all_to_all([experts[of] for of in going])
        counts = [len(of_rank) for of_rank in numbers]
        came = torch.cat(self._communicator.all_to_all([own[of] for of in going], counts))
        step = shares.of_ranks[-1].stop
        self.rows = own.new_zeros(step, own.shape[1])
        self.rows[: len(came)] = came
        self.experts = experts.new_full((step, experts.shape[1]), _NONE)
        self.experts[: len(came)] = torch.cat(numbers)
        here = ranks.here(self.experts, self._communicator.rank)
        self._pairs = torch.where(here.flatten())[0]
        self._returning = [int(of_rank.sum()) for of_rank in here[: len(came)].split(counts)]

    def bring_back(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `RowTrip.bring_back`."""
        coming = [int(chosen.sum()) for chosen in self._chosen]
        came = self._communicator.all_to_all(outputs[self._pairs].split(self._returning), coming)
        back = outputs.new_empty(self._chosen[0].numel(), outputs.shape[1])
        back[torch.cat([torch.where(chosen.flatten())[0] for chosen in self._chosen])] = torch.cat(came)
        return back


class WholeTrip:
    """Trip in sizes that depend on the number of rows alone."""

    def __init__(
        self, ranks: ExpertRanks, own: torch.Tensor, experts: torch.Tensor, shares: RowShares
    ) -> None:
        """Send this rank's rows `own [rows, H]`, with their `experts [rows, K]`. Raises GroupBroken."""
        self._communicator, self._shares = ranks.communicator, shares
        self.rows = gather_rows(self._communicator, own, shares)
        self.experts = gather_rows(self._communicator, experts, shares)
        self._holders = ranks.holders(experts.flatten())

    def bring_back(self, outputs: torch.Tensor) -> torch.Tensor:
        """See `RowTrip.bring_back`."""
        count, pairs = self.experts.shape[1], len(self._holders)
        sent = [outputs[rows.start * count : rows.stop * count] for rows in self._shares.of_ranks]
        came = self._communicator.all_to_all(sent, [pairs] * len(sent))
        return torch.stack(came)[self._holders, torch.arange(pairs, device=outputs.device)]
