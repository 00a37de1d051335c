"""The interface of quantised matrices with their biases."""

from __future__ import annotations

from typing import Protocol

import torch

from diptych.engine.backends.triton.operators import Operators


class Product(Protocol):
    """A matrix `[outputs, inputs]` on the device that multiplies rows by itself."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""

    @property
    def room(self) -> int:
        """Numbers of 16 bits that `multiply` may write to its `room`."""

    def multiply(
        self, operators: Operators, x: torch.Tensor, room: torch.Tensor | None, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply `x [T, inputs]` with the matrix and add the bias, into `out [T, outputs]`.

        `out` may be columns of a wider tensor, and float32. `room` is memory for `room` numbers of the type
        of `x`, whatever they were, or None where no step has enough rows to use it.
        """
        ...
