"""Matrices of a layer's experts: packed codes (kernels/packed_stack.py) if all are alike, or full numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.make import dense_matrix
from diptych.engine.weights import Matrix
from kernels.packed_stack import PackedStack, lacks, stack


class ExpertProduct(Protocol):
    """Matrices `[experts, outputs, inputs]` on the device, with their biases."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""

    def gated(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor, **activation: Any
    ) -> torch.Tensor:
        """Write `act(gate) * up` of each row of `x [T, inputs]` and its experts into `out`, by expert."""
        ...

    def multiply(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows `x`, by expert, with their expert's matrix, into `out` in the order of pairs."""
        ...


class DenseExperts(Linear):
    """Full numbers `[E, outputs, inputs]` and biases `[E, outputs]`."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gated(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor, **activation: Any
    ) -> torch.Tensor:
        """See `ExpertProduct.gated`."""
        return operators.expert_swiglu(x, self.weight, self.bias, routed, out=out, **activation)

    def multiply(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertProduct.multiply`."""
        return operators.expert_linear(x, self.weight, self.bias, routed, out=out)


@dataclass(frozen=True)
class PackedExpertProduct:
    """Packed codes and biases `[E, outputs]`."""

    weight: PackedStack
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gated(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor, **activation: Any
    ) -> torch.Tensor:
        """See `ExpertProduct.gated`."""
        return operators.packed_expert_swiglu(x, self.weight, self.bias, routed, out=out, **activation)

    def multiply(
        self, operators: Operators, x: torch.Tensor, routed: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertProduct.multiply`."""
        return operators.packed_expert_linear(x, self.weight, self.bias, routed, out=out)


def expert_product(
    device: torch.device, experts: Sequence[Sequence[Matrix]], biases: Sequence[torch.Tensor]
) -> ExpertProduct:
    """Return the product with each expert's matrices, rows after rows, and its bias where there are such.

    What cannot be stacked in codes is made full numbers; raises UnsupportedModel for the CPU's quantised
    forms.
    """
    bias = torch.stack(list(biases)).to(device) if biases else None
    if lacks(experts) is None:
        return PackedExpertProduct(stack(experts).to(device), bias)
    numbers = [torch.cat([dense_matrix(matrix) for matrix in own]) for own in experts]
    return DenseExperts(torch.stack(numbers).to(device), bias)
