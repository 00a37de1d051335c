"""Linear layers of a step: by kernels of our own where rows are few, else by the library.

A library's kernels are made for many rows; up to sixteen, a step is the reading of the weights, and
kernels/gpu/skinny_linear.py reads them faster. Among so few a row's bits are the same whatever stands beside
it; from seventeen on the library rounds otherwise. Quantised matrices multiply by themselves (products/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import PackedWeights
from diptych.engine.backends.triton.products.dense import Linear, library_product
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.rounded_inputs import Rows, gated_rows, multiply
from diptych.engine.models.shape import ModelShape

FEW_ROWS = 16
"""No more are given to `skinny_linear` and `skinny_swiglu`."""
_ALIGNED = 8
"""Numbers of 16 bits that are read at once: rows of weights begin at a multiple, or the library is faster."""


class Products(Protocol):
    """The linear layers of one model, and its output matrix."""

    activation: dict[str, Any]
    """Function of gates, as the operators take it."""

    def linear(self, x: Rows, by: Linear | Product, *, out: torch.Tensor) -> torch.Tensor:
        """Multiply `x [T, in]` with the weight and add the bias, into `out [T, out]`.

        Rows may be rounded where the matrix takes such.
        """
        ...

    def feed_forward(
        self,
        x: Rows,
        gate_up: Linear | Product,
        down: Linear | Product,
        room: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply `x [T, in]` with gates and ups, and `act(gate) * up [T, n]` with `down`, into `out`.

        `room` is for what lies between, `[T, 2 * n]` and `[T, n]`.
        """
        ...

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Write the logits of `hidden [rows, hidden]` into `out`, float32 `[rows, vocab]`."""
        ...


class LinearOperators:
    """The linear layers of a model by the kernels that are fastest for a step's rows."""

    def __init__(self, weights: PackedWeights, operators: Operators, shape: ModelShape) -> None:
        self._operators = operators
        self.activation: dict[str, Any] = {
            "activation": shape.activation,
            "limit": None if shape.experts is None else shape.experts.clamp,
        }
        self._short = weights.dtype.itemsize == 2
        self._weights = weights
        self._wide_head = choose_head_product(weights)
        room = max((product.room for product in weights.products()), default=0)
        self._room = torch.empty(room, dtype=weights.dtype, device=weights.device) if room else None

    def linear(self, x: Rows, by: Linear | Product, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        if not isinstance(by, Linear):
            return multiply(self._operators, x, by, self._room, out)
        assert isinstance(x, torch.Tensor), "full numbers take no rounded rows"
        if self._few(x):
            return self._operators.skinny_linear(x, by.weight, by.bias, out=out)
        return library_product(x, by, out)

    def feed_forward(
        self,
        x: Rows,
        gate_up: Linear | Product,
        down: Linear | Product,
        room: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See `Products.feed_forward`."""
        both, inner = room
        if isinstance(gate_up, Linear) and isinstance(x, torch.Tensor) and self._few(x):
            self._operators.skinny_swiglu(x, gate_up.weight, gate_up.bias, out=inner, **self.activation)
            return self.linear(inner, down, out=out)
        self.linear(x, gate_up, out=both)
        return self.linear(gated_rows(self._operators, both, down, inner, **self.activation), down, out=out)

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.head`."""
        head = self._weights.head
        if not isinstance(head, torch.Tensor):
            return head.multiply(self._operators, hidden, None, out=out)
        if self._few(hidden):
            return self._operators.skinny_linear(hidden, head, None, out=out)
        return self._wide_head(hidden, head, out)

    def _few(self, x: torch.Tensor) -> bool:
        return self._short and len(x) <= FEW_ROWS and x.shape[1] % _ALIGNED == 0


HeadProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose_head_product(weights: PackedWeights) -> HeadProduct:
    """Return how the library's last product comes to float32: within it where torch can, else rounded and
    widened.

    Logits of 20 in bfloat16 lie an eighth apart: whole groups of tokens would be equally likely.
    """
    if weights.dtype == torch.float32 or not isinstance(weights.head, torch.Tensor):
        return _plain
    row = torch.zeros((1, weights.head.shape[1]), dtype=weights.dtype, device=weights.device)
    out = torch.empty((1, len(weights.head)), dtype=torch.float32, device=weights.device)
    try:
        _wide(row, weights.head, out)
    except (RuntimeError, TypeError):  # CPUs, and versions of torch without it
        return _widened
    return _wide


def _plain(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden, head.t(), out=out)


def _wide(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden, head.t(), out_dtype=torch.float32, out=out)


def _widened(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(torch.mm(hidden, head.t()))
