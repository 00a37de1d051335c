"""Norms and activations that round what they make in the same launch, for matrices that take FP8 or int8.

A layer's rows are rounded before each of its products. Behind a norm or an activation that is a launch and a
way to memory that the kernel before spares: norm_round.py and swiglu_round.py give the bits of the two
launches. Rows with adapters, routers, products of several kinds, and few rows of FP8 want the numbers
themselves.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.products.scaled import RoundedRows, ScaledLinear
from diptych.engine.models.shape import ModelShape

Rows = torch.Tensor | RoundedRows
"""Inputs of a product, `[T, in]`."""
Matrix = Linear | Product | None


class Stream(Protocol):
    """Buffers of the residual stream, `[T, hidden]` each."""

    @property
    def residual(self) -> torch.Tensor:
        """Return the stream itself."""
        ...

    @property
    def normed(self) -> torch.Tensor:
        """Return its norm, which the next half reads."""
        ...

    @property
    def added(self) -> torch.Tensor:
        """Return what a half of a layer adds."""
        ...


class Norms:
    """Norms of the residual of one model, each rounded for the product behind it if that alone takes it."""

    def __init__(self, shape: ModelShape, operators: Operators) -> None:
        self._eps, self._scale, self._operators = shape.rms_eps, shape.residual_scale, operators

    def first(self, norm: torch.Tensor | None, before: Matrix, buffers: Stream) -> Rows:
        """Return the residual as the product `before` which it comes reads it, normalised by `norm` if any.

        `before` is None where the numbers are wanted as they are.
        """
        if norm is None:
            return buffers.residual
        if rounds(before, self._operators, len(buffers.residual)):
            return before.round(self._operators.norm_round, buffers.residual, norm, self._eps)
        return self._operators.rms_norm(buffers.residual, norm, self._eps, out=buffers.normed)

    def add(
        self,
        own_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        before: Matrix,
        buffers: Stream,
    ) -> Rows:
        """Add `buffers.added`, normalised by `own_norm` if there is one, to the residual.

        Returns what the next half reads, as `first` does with `next_norm`.
        """
        operators, eps, residual = self._operators, self._eps, buffers.residual
        if own_norm is not None:
            operators.rms_norm(buffers.added, own_norm, eps, out=buffers.added)
        if self._scale != 1.0:
            buffers.added.mul_(self._scale)
        if next_norm is None:
            return residual.add_(buffers.added)
        if rounds(before, operators, len(residual)):
            return before.round(operators.norm_round, buffers.added, next_norm, eps, residual=residual)
        return operators.add_rms_norm(buffers.added, residual, next_norm, eps, out=buffers.normed)


def rounds(before: Matrix, operators: Operators, rows: int) -> TypeGuard[ScaledLinear]:
    """Return whether so many rows are rounded for the product `before` which they come."""
    return isinstance(before, ScaledLinear) and before.rounds(operators, rows)


def multiply(
    operators: Operators, x: Rows, by: Product, room: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, rounded or not, with a quantised matrix; see `Product.multiply`."""
    if isinstance(x, RoundedRows):
        assert isinstance(by, ScaledLinear), "rows were rounded for another matrix"
        return by.multiply_rounded(operators, x, out=out)
    return by.multiply(operators, x, room, out=out)


def gated_rows(
    operators: Operators, gate_up: torch.Tensor, before: Linear | Product, out: torch.Tensor, **how: Any
) -> Rows:
    """Return `act(gate) * up` of `gate_up [T, 2 * n]` as the product `before` which it comes reads it.

    `out [T, n]` has it where it is not rounded; `how` is that of the operator swiglu.
    """
    if rounds(before, operators, len(gate_up)):
        return before.round(operators.swiglu_round, gate_up, **how)
    return operators.swiglu(gate_up, out=out, **how)
