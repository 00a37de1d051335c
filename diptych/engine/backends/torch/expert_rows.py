"""Experts whose rows are sent to them: all-to-all between the ranks of a stage.

    route     each rank its share of the rows, a part's at a time
    dispatch  a row goes once to each rank that has an expert of it, with these experts' numbers
    compute   an expert computes the rows of all ranks in one product, in their order in the step
    combine   the outputs come back, and a row's are added in float32 in ascending order of the experts, then
              the shared expert's, which every rank has whole; the sum is rounded once

The products have the same shapes at every degree, and the sums the same order. So the same parts give the
same bits; where each part adds its own experts' outputs (parts_decoder.py) the order is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from diptych.engine.backends.torch.experts import ExpertFeedForward
from diptych.engine.parallel.communicator import Communicator

_NOT_HERE = -1


class ExpertRows:
    """The experts of one layer, over all ranks.

    Args:
        communicator: the ranks of the stage.
        own: experts of each of this rank's parts.
        spans: numbers of the experts that each rank has.
    """

    def __init__(
        self, communicator: Communicator, own: Sequence[ExpertFeedForward], spans: Sequence[range]
    ) -> None:
        self._communicator, self._spans = communicator, spans
        self._lead = own[0]
        self._holders: Mapping[int, ExpertFeedForward] = {
            number: experts for experts in own for number in experts.numbers
        }
        for experts in own[1:]:
            experts.share_shared(self._lead)

    def __call__(self, x_TH: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
        """Return the feed-forward output of this rank's normed rows `[T, H]`; `parts` says whose they are."""
        experts_TK, weights_TK = self._route(x_TH, parts)
        here = [(experts_TK >= span.start) & (experts_TK < span.stop) for span in self._spans]
        out_QH = self._there_and_back(x_TH, experts_TK, here)
        sum_TH = torch.zeros(x_TH.shape, device=x_TH.device)
        place_TK = _places(here)
        for place_T, weight_T in zip(place_TK.unbind(1), weights_TK.unbind(1), strict=True):
            sum_TH += out_QH[place_T].float() * weight_T.unsqueeze(1)
        for rows in parts:
            if (shared := self._lead.shared(x_TH[rows])) is not None:
                sum_TH[rows] += shared
        return sum_TH.to(x_TH.dtype)

    def _route(self, x_TH: torch.Tensor, parts: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        routed = [self._lead.route(x_TH[rows]) for rows in parts]
        return torch.cat([experts for experts, _ in routed]), torch.cat([weights for _, weights in routed])

    def _there_and_back(
        self, x_TH: torch.Tensor, experts_TK: torch.Tensor, here: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the outputs of all ranks for own rows, rank by rank, each as `_places` has them."""
        rows = [torch.where(chosen.any(dim=1))[0] for chosen in here]
        numbers = [
            torch.where(chosen, experts_TK, _NOT_HERE)[of] for chosen, of in zip(here, rows, strict=True)
        ]
        came = self._communicator.all_to_all(numbers)
        counts = [len(of_rank) for of_rank in came]
        x_MH = torch.cat(self._communicator.all_to_all([x_TH[of] for of in rows], counts))
        out_QH = self._compute(x_MH, torch.cat(came))
        back = out_QH.split([int((of_rank != _NOT_HERE).sum()) for of_rank in came])
        return torch.cat(self._communicator.all_to_all(back, [int(chosen.sum()) for chosen in here]))

    def _compute(self, x_MH: torch.Tensor, experts_MK: torch.Tensor) -> torch.Tensor:
        """Return the outputs of own experts, one for each number in `experts_MK`, row by row."""
        rows, places = torch.where(experts_MK != _NOT_HERE)
        chosen = experts_MK[rows, places]
        out_QH = x_MH.new_empty((len(rows), x_MH.shape[1]))
        for number in chosen.unique().tolist():
            at = torch.where(chosen == number)[0]
            out_QH[at] = self._holders[number].compute(number, x_MH[rows[at]])
        return out_QH


def _places(here: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return where the output of each row's experts lies, `[T, K]`: rank by rank, then row by row."""
    place_TK = torch.empty(here[0].shape, dtype=torch.int64, device=here[0].device)
    begin = 0
    for chosen in here:
        count = int(chosen.sum())
        place_TK[chosen] = torch.arange(begin, begin + count, device=place_TK.device)
        begin += count
    return place_TK
