"""Experts: the feed-forward half of a layer whose rows go to a few of its experts.

Names carry shapes: T rows, H hidden, E experts, K experts of a row.

The meaning, which the other backends keep:

- The router's product is float32, of the normed row widened, with float32 rows that are never quantised.
- A row's contributions, each an expert's output times its weight, are added in float32 in ascending order of
  the expert's number, from zero on; then the shared expert's output. The sum is rounded once.

A step is a loop over the experts that any row chose. Their products here are torch's, which may round a row
otherwise beside other rows: within one step and another a row's bits can differ in the last place, and where
two scores lie so near one another, the choice can. The native step's products do not depend on how many rows
an expert has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.models.shape import ExpertsShape
from diptych.engine.weights import ExpertWeights, Matrix
from kernels.route_experts import route_experts

Linear = Callable[..., torch.Tensor]
"""`linear(x [T, in], weight [out, in], bias [out] or None) -> [T, out]`."""
Gate = Callable[[torch.Tensor], torch.Tensor]
"""Activation: `[T, 2 * n]`, the gate in the first half, to `[T, n]`; of experts without a gate `[T, n]`."""


@dataclass(frozen=True)
class _Expert:
    """Matrices of one expert, gate and up joined; up alone where there is no gate."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class ExpertFeedForward:
    """The experts of one layer, with the shared one."""

    def __init__(
        self,
        shape: ExpertsShape,
        weights: ExpertWeights,
        linear: Linear,
        dense: Callable[[Matrix], torch.Tensor],
        gate: Gate,
    ) -> None:
        """Prepare the experts; `dense` gives the numbers of a stored matrix, `linear` multiplies by them."""
        self._shape = shape
        self._router = weights.router, weights.router_bias, weights.correction_bias
        self._shared_router = weights.shared_router
        self._linear = linear
        self._gate = gate
        self._experts = {number: _expert(weights, at, dense) for at, number in enumerate(shape.own)}
        self._shared = _shared(weights, dense, gated=shape.gated)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward output of normed rows: `[T, H]` in their dtype.

        Where only some experts are here, it is what these give.
        """
        experts_TK, weights_TK = self.route(x_TH)
        sum_TH = torch.zeros(x_TH.shape, device=x_TH.device)
        for number in filter(self._experts.__contains__, experts_TK.unique().tolist()):
            rows, places = torch.where(experts_TK == number)
            out = self.compute(number, x_TH[rows]).float()
            sum_TH[rows] += out * weights_TK[rows, places].unsqueeze(1)
        if (shared := self.shared(x_TH)) is not None:
            sum_TH += shared
        return sum_TH.to(x_TH.dtype)

    @property
    def numbers(self) -> Collection[int]:
        """Numbers of the experts that are here."""
        return self._experts.keys()

    def compute(self, number: int, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert that is here, `[T, H]`."""
        return self._compute(self._experts[number], x_TH)

    def shared(self, x_TH: torch.Tensor) -> torch.Tensor | None:
        """Return the output of the shared expert in float32, `[T, H]`; None where there is none."""
        if self._shared is None:
            return None
        shared = self._compute(self._shared, x_TH).float()
        if self._shared_router is not None:
            shared *= torch.sigmoid(functional.linear(x_TH.float(), self._shared_router))
        return shared

    def share_shared(self, other: ExpertFeedForward) -> None:
        """Let the shared expert, which both have whole, be held once."""
        self._shared = other._shared

    def route(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each row, ascending, and their weights: `[T, K]` both."""
        shape, (router, bias, correction) = self._shape, self._router
        logits = functional.linear(x_TH.float(), router, bias)
        return route_experts(
            logits,
            correction,
            count=shape.experts_per_token,
            routing=shape.routing,
            normalise=shape.normalise,
            scale=shape.scale,
            groups=shape.groups,
            groups_per_token=shape.groups_per_token,
            group_score=shape.group_score,
        )

    def _compute(self, expert: _Expert, x_TH: torch.Tensor) -> torch.Tensor:
        inner = self._gate(self._linear(x_TH, expert.gate_up, expert.gate_up_bias))
        return self._linear(inner, expert.down, expert.down_bias)


def _expert(weights: ExpertWeights, at: int, dense: Callable[[Matrix], torch.Tensor]) -> _Expert:
    biased = bool(weights.gate_biases)
    return _Expert(
        gate_up=torch.cat([dense(matrices[at]) for matrices in (weights.gates, weights.ups) if matrices]),
        gate_up_bias=torch.cat([weights.gate_biases[at], weights.up_biases[at]]) if biased else None,
        down=dense(weights.downs[at]),
        down_bias=weights.down_biases[at] if weights.down_biases else None,
    )


def _shared(
    weights: ExpertWeights, dense: Callable[[Matrix], torch.Tensor], *, gated: bool
) -> _Expert | None:
    if weights.shared_up is None or weights.shared_down is None or (gated and weights.shared_gate is None):
        return None
    joined = [dense(one) for one in (weights.shared_gate, weights.shared_up) if one is not None]
    return _Expert(torch.cat(joined), None, dense(weights.shared_down), None)
