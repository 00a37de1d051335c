"""Matrices in packed codes (kernels/packed_matrix.py): by a kernel, and for whole prompts by the library."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.dense import Linear, library_product
from kernels.packed_matrix import PackedMatrix

LIBRARY_ROWS = 512
"""Rows from which the numbers are written out once for the library.

By arithmetic: an 8B model's are written and read in 8 ms on an H200, and the products of 512 rows take 10.
"""


FEW_ROWS = 16
"""Rows up to which the kernel finds reordered inputs itself; of more they are put in order first, and read in
whole words.
"""


@dataclass(frozen=True)
class PackedLinear:
    """A packed matrix and a bias."""

    weight: PackedMatrix
    bias: torch.Tensor | None
    _order: torch.Tensor | None = field(init=False, repr=False)
    """int64 `[inputs]`: the order of the columns, where they are reordered. Made here, since steps of two
    streams may want it first.
    """

    def __post_init__(self) -> None:
        order = self.weight.order
        object.__setattr__(self, "_order", None if order is None else order.long())

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def room(self) -> int:
        return self.outputs * self.inputs

    def multiply(
        self, operators: Operators, x: torch.Tensor, room: torch.Tensor | None, *, out: torch.Tensor
    ) -> torch.Tensor:
        """See `Product.multiply`."""
        weight = self.weight
        if self._order is not None and len(x) > FEW_ROWS:
            x, weight = x[:, self._order], replace(weight, order=None)
        if room is None or len(x) < LIBRARY_ROWS or out.dtype != x.dtype:
            return operators.packed_linear(x, weight, self.bias, out=out)
        dense = operators.unpack(weight, room[: self.room].view(self.outputs, self.inputs))
        return library_product(x, Linear(dense, self.bias), out)
