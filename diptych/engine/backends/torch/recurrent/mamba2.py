"""The layer of Mamba-2 (Dao and Gu 2024; Granite 4 H, Bamba, Falcon-H1, Nemotron-H).

Names carry shapes: T tokens of a step, B sequences with N tokens each, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.norms import group_norm
from diptych.engine.backends.torch.recurrent.projections import Projections
from diptych.engine.backends.torch.recurrent.state_space import state_space
from diptych.engine.models.recurrent_shapes import SpaceShape


class Mamba2(Projections):
    """See `RecurrentLayer`: X is what `SpaceShape.projected` lists, Y the channels of all heads.

    A token's bits depend on where its call begins: see `PIECE_ROWS`.
    """

    def __init__(
        self,
        shape: SpaceShape,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[..., torch.Tensor],
        eps: float,
    ) -> None:
        super().__init__(tensors, linear)
        self._shape, self._eps = shape, eps
        self._a = -tensors["decay"].float().exp()
        self._step_bias, self._skip = tensors["step_bias"].float(), tensors["skip"].float()

    def advance(
        self, mixed_BNX: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RecurrentLayer.advance`."""
        shape = self._shape
        gate, inner, step = mixed_BNX.split(shape.projected, dim=-1)
        seen, matrices = states
        inner, seen = causal_conv(inner, self._filter, self._tensors.get("conv_bias"), seen)
        kept = shape.groups * shape.state
        x, b, c = functional.silu(inner).split([shape.width, kept, kept], dim=-1)
        x = x.unflatten(-1, (shape.heads, shape.head_dim))
        b, c = (part.unflatten(-1, (shape.groups, shape.state)) for part in (b, c))
        steps = functional.softplus(step.float() + self._step_bias).clamp(*shape.step_bounds)
        out, matrices = state_space(x, steps, self._a, b, c, matrices)
        out = (out + x * self._skip.unsqueeze(-1)).flatten(2)
        return self._gated(out, functional.silu(gate.float())).to(mixed_BNX.dtype), (seen, matrices)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        match self._shape.norm:
            case "after_gate":
                return group_norm(out * gate, self._tensors["norm"], self._eps, self._shape.groups)
            case "before_gate":
                return group_norm(out, self._tensors["norm"], self._eps, self._shape.groups) * gate
            case "none":
                return out * gate
