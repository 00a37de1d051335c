"""Matrices of FP8 or int8 that take inputs of their own format (kernels/scaled_matrix.py).

Few rows and int8 are our own kernel's, other FP8 products the library's where it has them. Rounded inputs
are memory of their own, which a recorded step has from its graph's pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.scaled_mm import (
    ScaledProduct,
    find_product,
    fits,
    library_scales,
)
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
        product = self._library(x)
        if product is None:
            return operators.scaled_linear(rounded, scales, weight, self.bias, out=out)
        direct = out.dtype == torch.bfloat16 and out.is_contiguous()
        into = out if direct else out.new_empty(out.shape, dtype=torch.bfloat16)
        product(rounded, scales, weight.values, self._library_scales, out=into)
        if not direct:
            out.copy_(into)
        return out if self.bias is None else out.add_(self.bias)

    def _library(self, x: torch.Tensor) -> ScaledProduct | None:
        """Return the library's product of rows `x` if it is to be taken."""
        if len(x) <= FEW_ROWS or self.weight.values.dtype == INT8 or not fits(self.weight):
            return None
        return find_product(x.device, self.weight.squares)

    @cached_property
    def _library_scales(self) -> torch.Tensor:
        return library_scales(self.weight)
