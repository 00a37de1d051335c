"""Matrices of full numbers, and their product by the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Linear:
    """A matrix and a bias; diptych/engine/backends/triton/linear.py multiplies by them."""

    weight: torch.Tensor
    """`[out, in]`, row-major; of experts `[E, out, in]`."""
    bias: torch.Tensor | None
    """`[out]`; of experts `[E, out]`."""

    @property
    def inputs(self) -> int:
        return self.weight.shape[-1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[-2]


def library_product(x: torch.Tensor, by: Linear, out: torch.Tensor) -> torch.Tensor:
    """Multiply `x [T, in]` with the weight and add the bias, into `out [T, out]`."""
    if by.bias is None:
        return torch.mm(x, by.weight.t(), out=out)
    return torch.addmm(by.bias, x, by.weight.t(), out=out)
