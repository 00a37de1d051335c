"""The layer of Mamba (Gu and Dao 2023), with Jamba's norms of its steps, B and C (Lieber et al. 2024).

Names carry shapes: T tokens of a step, B sequences with N tokens each, H hidden, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.norms import group_norm
from diptych.engine.backends.torch.recurrent.projections import Projections
from diptych.engine.backends.torch.recurrent.selective_scan import selective_scan
from diptych.engine.models.recurrent_shapes import ScanShape

Change = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""`change(matrix, x, out)`: returns `out [rows, outputs]`, the product of a matrix with `x [rows, inputs]`,
with what adapters add to it.
"""


class Mamba(Projections):
    """See `RecurrentLayer`: X is the channels' inputs and their gates, Y the channels."""

    def __init__(
        self,
        shape: ScanShape,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[..., torch.Tensor],
        eps: float,
    ) -> None:
        super().__init__(tensors, linear)
        self._shape, self._eps = shape, eps
        self._a = -tensors["decay"].float().exp()
        self._skip = tensors["skip"].float()

    def advance(
        self, mixed_BNX: torch.Tensor, states: tuple[torch.Tensor, ...], change: Change | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RecurrentLayer.advance`; `change` is what adapters add to the products within."""
        shape, tensors = self._shape, self._tensors
        inner, gate = mixed_BNX.chunk(2, dim=-1)
        seen, matrices = states
        inner, seen = causal_conv(inner, self._filter, tensors.get("conv_bias"), seen)
        x = functional.silu(inner)
        read = self._product(x.to(mixed_BNX.dtype), "x_proj", change)
        step, b, c = read.split([shape.rank, shape.state, shape.state], dim=-1)
        step, b, c = (
            group_norm(part, tensors[f"{name}_norm"], self._eps, 1)
            for name, part in (("step", step), ("b", b), ("c", c))
        )
        steps = self._product(step.to(mixed_BNX.dtype), "step_proj", change)
        steps = functional.softplus(steps + tensors["step_bias"].float())
        out, matrices = selective_scan(x, steps, self._a, b, c, matrices)
        out = (out + x * self._skip) * functional.silu(gate.float())
        return out.to(mixed_BNX.dtype), (seen, matrices)

    def _product(self, x_BNI: torch.Tensor, matrix: str, change: Change | None) -> torch.Tensor:
        """Return the rows' product with a matrix of the layer, float32 `[B, N, out]`."""
        x = x_BNI.flatten(0, 1)
        rows = self._linear(x, self._tensors[matrix])
        if change is not None:
            rows = change(matrix, x, rows)
        return rows.float().view(*x_BNI.shape[:2], rows.shape[-1])
