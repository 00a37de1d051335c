"""Matrices of one input that are of several kinds: multiplied one after another into their columns.

llama.cpp gives the values of half the layers more bits than queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.dense import Linear, library_product
from diptych.engine.backends.triton.products.product import Product


@dataclass(frozen=True)
class JoinedLinear:
    """Matrices with their biases, in the order of their outputs."""

    parts: tuple[Product | Linear, ...]

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def nbytes(self) -> int:
        return sum(part.weight.nbytes if isinstance(part, Linear) else part.nbytes for part in self.parts)

    @property
    def room(self) -> int:
        return max(0 if isinstance(part, Linear) else part.room for part in self.parts)

    def multiply(
        self, operators: Operators, x: torch.Tensor, room: torch.Tensor | None, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `Product.multiply`."""
        begin = 0
        for part in self.parts:
            columns = out[:, begin : begin + part.outputs]
            begin += part.outputs
            if isinstance(part, Linear):
                library_product(x, part, columns)
            else:
                part.multiply(operators, x, room, out=columns)
        return out
