"""The batch-invariant step: operators and products whose bits depend on a row alone.

By default a row has the same bits beside up to fifteen others (linear.py); of more rows the library's kernels
round otherwise, and a token of a chunk is summed in another order than one that is decoded. Here every sum
has one order (kernels/gpu/invariant_linear.py, invariant_attention.py), and what already had one stays:
norms and the choice of experts take a program a row, rotations and writes tiles of one size, adapters and
sampling a row each.

Quantised matrices are multiplied sixteen rows at a time: up to there a product is a kernel whose tile holds
all of them, whatever their number. A prompt reads them once for every sixteen tokens. Experts' products, of
full numbers or of codes, have tiles of sixteen rows in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.engine.backends.triton.linear import FEW_ROWS, LinearOperators, Products
from diptych.engine.backends.triton.operators import Operators, TritonUnavailable, triton_operators
from diptych.engine.backends.triton.packed_weights import PackedWeights
from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.experts import PackedExpertProduct
from diptych.engine.backends.triton.products.joined import JoinedLinear
from diptych.engine.backends.triton.products.packed import PackedLinear
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.products.scaled import ScaledLinear
from diptych.engine.backends.triton.rounded_inputs import Rows, gated_rows, multiply
from diptych.engine.models.shape import ModelShape, UnsupportedModel

NO_TREES = "a token of a tree has other bits than without its siblings (--batch-invariant)"
_INVARIANT_PRODUCTS = (PackedLinear, ScaledLinear, JoinedLinear)
"""Quantised products that give a row the same bits beside up to fifteen others."""


def invariant_operators() -> Operators:
    """Return the Triton kernels in one order of sums each. Raises TritonUnavailable."""
    plain = triton_operators()
    try:
        # Imported here, as in triton_operators.
        from kernels.gpu.invariant_attention import invariant_prefill
        from kernels.gpu.invariant_decode import invariant_decode, make_invariant_scratch
        from kernels.gpu.invariant_linear import invariant_linear
    except ImportError as error:
        raise TritonUnavailable(f"no Triton kernels here: {error}") from error
    return replace(
        plain,
        paged_decode=invariant_decode,
        paged_prefill=invariant_prefill,
        make_scratch=make_invariant_scratch,
        rotary_write=partial(plain.rotary_write, one_tile=True),
        fresh_rows=None,
        expert_swiglu=partial(plain.expert_swiglu, one_tile=True),
        expert_linear=partial(plain.expert_linear, one_tile=True),
        packed_expert_swiglu=partial(plain.packed_expert_swiglu, one_tile=True),
        packed_expert_linear=partial(plain.packed_expert_linear, one_tile=True),
        invariant_linear=invariant_linear,
    )


def choose_products(weights: PackedWeights, operators: Operators, shape: ModelShape) -> Products:
    """Return the linear layers of a step that these operators make.

    Raises UnsupportedModel for a format of weights that the batch-invariant step does not multiply.
    """
    if operators.invariant_linear is None:
        return LinearOperators(weights, operators, shape)
    return InvariantProducts(weights, operators, shape)


class InvariantProducts:
    """The linear layers of one model, in which a row has the same bits in any step."""

    def __init__(self, weights: PackedWeights, operators: Operators, shape: ModelShape) -> None:
        """Take the weights, and try products of each depth once.

        Raises UnsupportedModel for a format of weights that is not multiplied so.
        """
        assert operators.invariant_linear is not None
        self._multiply, self._operators, self._weights = operators.invariant_linear, operators, weights
        self.activation: dict[str, Any] = {
            "activation": shape.activation,
            "limit": None if shape.experts is None else shape.experts.clamp,
        }
        refused = sorted({type(found).__name__ for found in _refused(weights)})
        if refused:
            raise UnsupportedModel(
                f"--batch-invariant: matrices of {', '.join(refused)} are not multiplied in one order"
            )
        for matrix in _dense(weights):  # the first product of a depth computes more than itself
            row = matrix.new_zeros(1, matrix.shape[1])
            self._multiply(row, matrix[:1], None)

    def linear(self, x: Rows, by: Linear | Product, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        if isinstance(by, Linear):
            assert isinstance(x, torch.Tensor), "full numbers take no rounded rows"
            return self._multiply(x, by.weight, by.bias, out=out)
        if isinstance(by, JoinedLinear):
            begin = 0
            for part in by.parts:
                self.linear(x, part, out=out[:, begin : begin + part.outputs])
                begin += part.outputs
            return out
        for begin in range(0, len(x), FEW_ROWS):
            rows = slice(begin, begin + FEW_ROWS)
            multiply(self._operators, x[rows], by, None, out[rows])
        return out

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
        self.linear(x, gate_up, out=both)
        return self.linear(gated_rows(self._operators, both, down, inner, **self.activation), down, out=out)

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """See `Products.head`."""
        head = self._weights.head
        return self.linear(hidden, Linear(head, None) if isinstance(head, torch.Tensor) else head, out=out)


def _refused(weights: PackedWeights) -> Iterator[object]:
    """Yield the matrices that are not multiplied in one order."""
    for product in weights.products():
        parts = product.parts if isinstance(product, JoinedLinear) else (product,)
        yield from (part for part in parts if not isinstance(part, (Linear, *_INVARIANT_PRODUCTS)))
    for layer in weights.layers:
        if layer.experts is not None:
            both: tuple[object, ...] = layer.experts.gate_up, layer.experts.down
            yield from (one for one in both if not isinstance(one, (Linear, PackedExpertProduct)))


def _dense(weights: PackedWeights) -> Iterator[torch.Tensor]:
    """Yield a matrix of full numbers `[outputs, inputs]` of each depth that there is."""
    found: dict[int, torch.Tensor] = {}
    for layer in weights.layers:
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
            for part in product.parts if isinstance(product, JoinedLinear) else (product,):
                if isinstance(part, Linear):
                    found.setdefault(part.inputs, part.weight)
        if layer.experts is not None:
            for shared in (layer.experts.shared_gate_up, layer.experts.shared_down):
                if isinstance(shared, Linear):
                    found.setdefault(shared.inputs, shared.weight)
    if isinstance(weights.head, torch.Tensor):
        found.setdefault(weights.head.shape[1], weights.head)
    yield from found.values()
