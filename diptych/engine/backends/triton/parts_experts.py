"""Experts of a rank's parts whose rows are sent to them; the meaning is backends/torch/expert_rows.py.

    share    all parts of attention, of this rank's share of the rows, are added to its residual and normed
    route    each part its rows
    send     rows go to the ranks of their experts (expert_exchange.py)
    compute  an expert computes the rows of all ranks in one product, in their order in the step
    return   a row's outputs come back, and are added in float32 in ascending order of the experts, then the
             shared expert's, which every rank has whole
    gather   all ranks have all rows again

Products of experts are launched for as many rows as the step has, at every degree: tiles are chosen by them.
Every other product here has a part's rows. So the same parts give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.engine.backends.triton.expert_exchange import CountedTrip, ExpertRanks, RowTrip, WholeTrip
from diptych.engine.backends.triton.layer_halves import LayerHalves
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import PackedExperts, PackedLayer, PackedWeights
from diptych.engine.backends.triton.parts_activations import PartsActivations
from diptych.engine.backends.triton.rounded_inputs import Norms
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.parts import Part
from diptych.engine.parallel.row_exchange import gather_rows, parts_of_own_rows
from diptych.engine.parallel.row_shares import RowShares, share_rows


@dataclass(frozen=True)
class _OwnRows:
    """Streams of this rank's share of the rows, `[rows, hidden]`, views of those of all rows."""

    residual: torch.Tensor
    normed: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, buffers: PartsActivations, rows: range) -> _OwnRows:
        """Return the streams of some rows in a row."""
        own = slice(rows.start, rows.stop)
        return cls(buffers.residual[own], buffers.normed[own], buffers.added[own])


class PartsExperts:
    """The second half of layers with experts, over all ranks of a stage."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        halves: Sequence[LayerHalves],
        operators: Operators,
        communicator: Communicator,
    ) -> None:
        """Take all parts of the model, whose experts are dealt whole, and the halves of those that are this
        rank's.
        """
        assert shape.experts is not None
        self._parts, self._halves, self._operators = len(parts), halves, operators
        self._communicator, self._count = communicator, shape.experts.num_experts
        self._norms = Norms(shape, operators)
        self._ranks = ExpertRanks(parts, communicator, halves[0].weights.device)

    def add(self, index: int, layer: PackedLayer, buffers: PartsActivations, *, recorded: bool) -> None:
        """Add the sums of attention, in `buffers.outputs` of all ranks, and the experts of layer `index` to
        the residual.

        Nothing comes to the host in a `recorded` step. Raises GroupBroken.
        """
        assert layer.post_norm is not None, "rows are normed before their experts"
        shares = share_rows(len(buffers.residual), self._parts, self._communicator.ranks)
        own = _OwnRows.of(buffers, shares.of_ranks[self._communicator.rank])
        parts = parts_of_own_rows(self._communicator, buffers.outputs, shares)
        if len(own.residual):
            self._operators.sum_parts(parts, out=own.added)
            self._norms.add(layer.attention_out_norm, layer.post_norm, None, own)
        self._through_experts(index, own, buffers, shares, recorded=recorded)
        if len(own.residual):
            self._norms.add(layer.feed_forward_out_norm, None, None, own)
        buffers.residual.copy_(gather_rows(self._communicator, own.residual, shares))

    def _through_experts(
        self, index: int, own: _OwnRows, buffers: PartsActivations, shares: RowShares, *, recorded: bool
    ) -> None:
        """Compute the experts of `own.normed`, into `own.added`."""
        rows = shares.own_parts(self._communicator.rank)
        routed = [self._route(index, own.normed[of], number, buffers) for number, of in enumerate(rows)]
        experts = torch.cat([choice.experts for choice in routed])
        trip: RowTrip = (WholeTrip if recorded else CountedTrip)(self._ranks, own.normed, experts, shares)
        back = trip.bring_back(self._compute(index, trip.rows, trip.experts, buffers))
        count = experts.shape[1]
        for number, of in enumerate(rows):
            if of.stop > of.start:
                room = replace(buffers.own[0].rows(of.stop - of.start), added=own.added[of])
                pairs = back[of.start * count : of.stop * count]
                half = self._halves[number]
                half.experts.add(_experts_of(half, index), own.normed[of], pairs, routed[number], room)

    def _route(self, index: int, x: torch.Tensor, number: int, buffers: PartsActivations) -> Any:
        """Choose the experts of rows `x` of own part `number`."""
        half, room = self._halves[number], buffers.own[number].experts
        assert room is not None
        return half.experts.route(_experts_of(half, index), x, room.routed.rows(len(x)))

    def _compute(
        self, index: int, x_TH: torch.Tensor, experts_TK: torch.Tensor, buffers: PartsActivations
    ) -> torch.Tensor:
        """Return the outputs of own experts for `x`, in the order of pairs; others are no numbers."""
        room = buffers.own[0].experts
        assert room is not None
        routed = self._operators.order_rows(experts_TK, self._count)
        for half, own in zip(self._halves, buffers.own, strict=True):
            assert own.experts is not None
            half.experts.multiply(_experts_of(half, index), x_TH, routed, own.experts, room.parts)
        return room.parts


def _experts_of(half: LayerHalves, index: int) -> PackedExperts:
    experts = half.weights.layers[index].experts
    assert experts is not None
    return experts


def with_one_shared_expert(weights: Sequence[PackedWeights]) -> list[PackedWeights]:
    """Return the weights of a rank's parts, which hold the expert of every token once."""
    lead, *others = weights

    def of_lead(layer: PackedLayer, first: PackedLayer) -> PackedLayer:
        if layer.experts is None or first.experts is None:
            return layer
        shared = first.experts.shared_gate_up, first.experts.shared_down
        experts = replace(layer.experts, shared_gate_up=shared[0], shared_down=shared[1])
        return replace(layer, experts=experts)

    def layers(one: PackedWeights) -> tuple[PackedLayer, ...]:
        return tuple(map(of_lead, one.layers, lead.layers))

    return [lead, *(replace(one, layers=layers(one)) for one in others)]
