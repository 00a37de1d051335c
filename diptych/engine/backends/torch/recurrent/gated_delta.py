"""The layer of the gated delta rule (Qwen3-Next, Qwen3.5; Yang et al. 2024).

Names carry shapes: T tokens of a step, B sequences with N tokens each, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.delta_rule import delta_rule
from diptych.engine.backends.torch.recurrent.norms import group_norm, unit_rows
from diptych.engine.models.recurrent_shapes import DeltaShape


class GatedDelta:
    """See `RecurrentLayer`: X is what `DeltaShape.projected` lists, Y the values of all heads.

    A token's bits depend on where its call begins: see `PIECE_ROWS`.
    """

    def __init__(
        self,
        shape: DeltaShape,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[..., torch.Tensor],
        eps: float,
    ) -> None:
        self._shape, self._linear, self._eps = shape, linear, eps
        self._in = torch.cat([tensors["qkv_proj"], tensors["gate_proj"]])
        self._rates = torch.cat([tensors["rate"], tensors["step"]])
        self._filter = tensors["conv"].squeeze(1)
        self._speed = tensors["decay"].float().exp()
        self._step_bias = tensors["step_bias"].float()
        self._norm, self._out = tensors["norm"], tensors["out_proj"]

    def project(self, x_TH: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.project`."""
        return torch.cat(
            [self._linear(x_TH, self._in), functional.linear(x_TH, self._rates.to(x_TH))], dim=-1
        )

    def advance(
        self, mixed_BNX: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RecurrentLayer.advance`."""
        shape = self._shape
        qkv, gate, rate, step = mixed_BNX.split(shape.projected, dim=-1)
        seen, matrices = states
        qkv, seen = causal_conv(qkv, self._filter, None, seen)
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        q, k, v = functional.silu(qkv).split([keys, keys, values], dim=-1)
        share = shape.value_heads // shape.key_heads
        q, k = (
            unit_rows(part.unflatten(-1, (shape.key_heads, shape.key_dim))).repeat_interleave(share, dim=2)
            for part in (q, k)
        )
        heads = shape.value_heads, shape.value_dim
        log_decay = -self._speed * functional.softplus(step.float() + self._step_bias)
        out, matrices = delta_rule(
            q * shape.key_dim**-0.5, k, v.unflatten(-1, heads), log_decay, rate.float().sigmoid(), matrices
        )
        normed = group_norm(out, self._norm, self._eps, 1)
        gated = normed * functional.silu(gate.float()).unflatten(-1, heads)
        return gated.flatten(2).to(mixed_BNX.dtype), (seen, matrices)

    def output(self, mixed_TY: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.output`."""
        return self._linear(mixed_TY, self._out)
