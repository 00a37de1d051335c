"""Matrices of FP8 or int8 that take inputs of their own format (kernels/scaled_matrix.py).

Few rows and int8 are our own kernel's, other FP8 products the library's where it has them. Few rows of FP8
are not rounded: their weights' bytes bound the product, and what rounding takes of the logits is spared
(docs/performance.md). Rounded inputs are memory of their own, which a recorded step has from its graph's
pool. Norms and activations round what they make in the same launch where one such matrix alone multiplies it
(rounded_inputs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
class RoundedRows:
    """Rows of inputs as `ScaledLinear.round` makes them."""

    values: torch.Tensor
    """FP8 or int8 `[T, inputs]`."""
    scales: torch.Tensor
    """float32 `[T, groups]` in the layout of kernels/gpu/round_rows.py."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> RoundedRows:
        return RoundedRows(self.values[rows], self.scales[rows])


@dataclass(frozen=True)
class ScaledLinear:
    """A matrix with scales and a bias."""

    weight: ScaledMatrix
    bias: torch.Tensor | None
    _library_scales: torch.Tensor = field(init=False, repr=False)
    """Scales as the library takes them: made here, since steps of two streams may want them first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_library_scales", library_scales(self.weight))

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

    def rounds(self, operators: Operators, rows: int) -> bool:
        """Return whether so many rows are rounded for this matrix.

        FP8 is not where rows are few, nor where rows have one order of sums in steps of any size: these are
        multiplied few at a time.
        """
        few = rows <= FEW_ROWS or operators.invariant_linear is not None
        return not few or self.weight.values.dtype == INT8

    def multiply(
        self, operators: Operators, x: torch.Tensor, room: torch.Tensor | None, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `Product.multiply`."""
        if not self.rounds(operators, len(x)):
            return operators.scaled_linear(x, None, self.weight, self.bias, out=out)
        return self.multiply_rounded(operators, self.round(operators.round_rows, x), out=out)

    def round(
        self, operator: Callable[..., tuple[torch.Tensor, torch.Tensor]], *given: Any, **more: Any
    ) -> RoundedRows:
        """Return the rows `[T, inputs]` that an operator makes of `given` and rounds as this matrix takes
        them.
        """
        weight = self.weight
        values, scales = operator(
            *given, dtype=weight.values.dtype, squares=weight.squares, static=weight.static, **more
        )
        return RoundedRows(values, scales)

    def multiply_rounded(self, operators: Operators, x: RoundedRows, *, out: torch.Tensor) -> torch.Tensor:
        """Do what `multiply` does, of rows that `round` made."""
        weight, product = self.weight, self._library(x.values)
        if product is None:
            return operators.scaled_linear(x.values, x.scales, weight, self.bias, out=out)
        direct = out.dtype == torch.bfloat16 and out.is_contiguous()
        into = out if direct else out.new_empty(out.shape, dtype=torch.bfloat16)
        product(x.values, x.scales, weight.values, self._library_scales, out=into)
        if not direct:
            out.copy_(into)
        return out if self.bias is None else out.add_(self.bias)

    def _library(self, x: torch.Tensor) -> ScaledProduct | None:
        """Return the library's product of rows `x` if it is to be taken."""
        if len(x) <= FEW_ROWS or self.weight.values.dtype == INT8 or not fits(self.weight):
            return None
        return find_product(x.device, self.weight.squares)
