"""Matrices of FP8 or int8 that take inputs of their own format (kernels/scaled_matrix.py).

Few rows, int8 and squares of scales are our own kernel's, other FP8 products the library's where it has them.
Rounded inputs are memory of their own, which a recorded step has from its graph's pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.scaled_mm import find_product, fits
from kernels.scaled_matrix import INT8, ScaledMatrix

FEW_ROWS = 16
"""Up to here a step is the reading of weights, and a row's bits do not depend on its neighbours."""


@dataclass(frozen=True)
class ScaledLinear:
    """A matrix with scales and a bias."""

    weight: ScaledMatrix
    bias: torch.Tensor | None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def room(self) -> int:
        return 0

    def multiply(
        self, operators: Operators, x: torch.Tensor, room: torch.Tensor | None, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `Product.multiply`."""
        weight = self.weight
        rounded, scales = operators.round_rows(
            x, weight.values.dtype, squares=weight.squares, static=weight.static
        )
        ours = len(x) <= FEW_ROWS or weight.squares or weight.values.dtype == INT8
        library = None if ours or not fits(*weight.shape) else find_product(x.device)
        if library is None:
            return operators.scaled_linear(rounded, scales, weight, self.bias, out=out)
        out.copy_(library(rounded, scales, weight.values, weight.scales))
        return out if self.bias is None else out.add_(self.bias)
