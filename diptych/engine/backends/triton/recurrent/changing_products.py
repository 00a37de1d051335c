"""The products of one recurrent layer, with what the adapters of a step's rows change of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diptych.engine.backends.triton.linear import Products
from diptych.engine.backends.triton.packed_step import PackedStep
from diptych.engine.backends.triton.packed_weights import PackedMixer
from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.rounded_inputs import Rows
from diptych.engine.weights.canonical import RECURRENT

Change = Callable[[str, Rows, torch.Tensor, PackedStep], None]
"""`change(product, x, out, step)`: adds what the rows' adapters change of a product of `x [T, in]`."""


class ChangingProducts:
    """See `Products`: those of a mixer, whose launches follow one another in one thread."""

    def __init__(self, products: Products, weights: PackedMixer, change: Change) -> None:
        """Take the model's products, the layer's weights, and what changes a product by its name."""
        self._products, self._change = products, change
        self._names = {id(one): RECURRENT + name for name, one in weights.products.items()}
        self.activation = products.activation
        self._step: PackedStep | None = None

    @contextmanager
    def of_step(self, step: PackedStep) -> Iterator[None]:
        """Let the rows that are multiplied within be those of `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def linear(self, x: Rows, by: Linear | Product, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        self._products.linear(x, by, out=out)
        if self._step is not None:
            self._change(self._names[id(by)], x, out, self._step)
        return out

    def feed_forward(self, *given: Any, out: torch.Tensor) -> torch.Tensor:
        """See `Products.feed_forward`: as it is, no layer of this kind has one within."""
        return self._products.feed_forward(*given, out=out)

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.head`: as it is."""
        return self._products.head(hidden, out=out)
