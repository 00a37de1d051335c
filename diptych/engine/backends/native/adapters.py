"""Adapters as the native step reads them: the A of joined matrices stacked, B in strips of columns."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.backends.native.recurrent import recurrent_products
from diptych.engine.backends.native.status import NativeError
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import RECURRENT, layer_shapes
from kernels.cpu import library as native

_STRIP, _DEPTH = 16, 32
"""Columns of a strip of B, and what the inputs of A are rounded up to (kernels/cpu)."""
PRODUCTS: dict[int, tuple[str, ...]] = {
    native.QKV: ("q", "k", "v", "q_gate"),
    native.OUTPUT: ("o",),
    native.GATE_UP: ("gate", "up"),
    native.DOWN: ("down",),
}
"""The products of attention and of a feed-forward, and the matrices that each joins."""


class AdaptedProduct(NamedTuple):
    """A product that an adapter changes."""

    layer: int
    which: int
    fields: Sequence[str]
    """Matrices that it joins."""
    rows: Sequence[int]
    """Outputs of each."""
    deltas: Mapping[str, Delta]
    """Changes of some of them."""
    joined: bool
    """True where borders of the matrices may lie within a strip of columns."""
    own_part: int = 0
    """Part of the rank whose product it is, where ranks share the model."""


def whole_products(shape: ModelShape, adapter: Adapter) -> Iterator[AdaptedProduct]:
    """Yield the products that an adapter changes of a model that one process computes."""
    for index, layer in enumerate(adapter.layers):
        sizes = dict(layer_shapes(shape, index))
        for which, fields in _products(shape, index).items():
            if any(field in layer for field in fields):
                present = present_fields(fields, sizes)
                rows = [sizes[field][0] for field in present]
                yield AdaptedProduct(index, which, present, rows, layer, has_uneven_strips(rows))


def _products(shape: ModelShape, layer: int) -> Mapping[int, tuple[str, ...]]:
    """Return the products of layer number `layer`, and the matrices that each joins."""
    own = shape.layers[layer].recurrent
    recurrent = {} if own is None else recurrent_products(own)
    return {
        **PRODUCTS,
        **{which: tuple(RECURRENT + name for name in names) for which, names in recurrent.items()},
    }


def present_fields(fields: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return those of the matrices of a product that a layer with tensors of these `sizes` has."""
    return [field for field in fields if field in sizes]


def has_uneven_strips(rows: Sequence[int]) -> bool:
    """Return whether borders of matrices with so many rows lie within a strip."""
    return any(count % _STRIP for count in rows)


class NativeAdapter:
    """An adapter in the memory that steps read."""

    def __init__(
        self, library: ctypes.CDLL, model: int, products: Iterator[AdaptedProduct], dtype: torch.dtype
    ) -> None:
        """Pack an adapter's changes of a model's products in `dtype`, the type of the model's numbers.

        Raises NativeError.
        """
        self._packed: list[torch.Tensor] = []
        changes = [self._change(product, dtype) for product in products]
        array = (native.Change * len(changes))(*changes)
        self.address: int = library.diptych_adapter_new(model, array, len(changes))
        if not self.address:
            raise NativeError(native.last_error(library))
        self._packed.clear()  # it was copied
        weakref.finalize(self, library.diptych_adapter_free, self.address)

    def _change(self, product: AdaptedProduct, dtype: torch.dtype) -> native.Change:
        """Return the change of a product as the native side takes it."""
        fields, rows, deltas = product.fields, product.rows, product.deltas
        begins, stacked = _stack([deltas[field] for field in fields if field in deltas])
        changed = [deltas.get(field) for field in fields]
        parts = [None if one is None else (one.b, begins[id(one.a)]) for one in changed]
        interleaved = product.which == native.GATE_UP and len(fields) == 2
        if not interleaved and product.joined:
            parts, rows = [(_joined(parts, rows, stacked), 0)], [sum(rows)]
        a = torch.cat([delta.a for delta in stacked]).to(dtype)
        a = torch.nn.functional.pad(a, (0, -a.shape[1] % _DEPTH))
        scales = torch.cat([torch.full((delta.rank,), delta.scale) for delta in stacked])
        change = native.Change(
            layer=product.layer,
            which=product.which,
            a=self._keep(_in_pairs(a)),
            scales=self._keep(scales),
            depth=a.shape[1],
            ranks=a.shape[0],
            parts=len(parts),
            interleaved=interleaved,
            own_part=product.own_part,
        )
        for number, (part, count) in enumerate(zip(parts, rows, strict=True)):
            change.part[number].strips = -(-count // _STRIP)
            if part is not None:
                b, begin = part
                change.part[number].b = self._keep(_in_strips(b.to(dtype)))
                change.part[number].begin, change.part[number].ranks = begin, b.shape[1]
        return change

    def _keep(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor, which lives until the native side has copied it."""
        self._packed.append(tensor.contiguous())
        return self._packed[-1].data_ptr()


def _stack(deltas: Sequence[Delta]) -> tuple[dict[int, int], list[Delta]]:
    """Return the first rank of each A in one stack, by its identity, and a change for each.

    Fused matrices share one A.
    """
    begins: dict[int, int] = {}
    stacked: list[Delta] = []
    for delta in deltas:
        if id(delta.a) not in begins:
            begins[id(delta.a)] = sum(one.rank for one in stacked)
            stacked.append(delta)
    return begins, stacked


def _joined(
    parts: Sequence[tuple[torch.Tensor, int] | None], rows: Sequence[int], stacked: Sequence[Delta]
) -> torch.Tensor:
    """Return one B of all ranks for matrices whose borders lie within a strip, with zeros elsewhere."""
    ranks = sum(delta.rank for delta in stacked)
    made = []
    for part, count in zip(parts, rows, strict=True):
        whole = torch.zeros(count, ranks)
        if part is not None:
            b, begin = part
            whole[:, begin : begin + b.shape[1]] = b
        made.append(whole)
    return torch.cat(made)


def _in_pairs(a: torch.Tensor) -> torch.Tensor:
    """Return A `[ranks, depth]` flat: two ranks by turns `[ranks / 2, depth / 32, 2, 32]`, then the last."""
    even = len(a) // 2 * 2
    pairs = a[:even].view(even // 2, 2, a.shape[1] // _DEPTH, _DEPTH).transpose(1, 2)
    return torch.cat([pairs.flatten(), a[even:].flatten()])


def _in_strips(b: torch.Tensor) -> torch.Tensor:
    """Return B `[out, rank]` as `[strips, rank, 16]`, the last strip padded with zeros."""
    padded = torch.nn.functional.pad(b, (0, 0, 0, -b.shape[0] % _STRIP))
    return padded.view(-1, _STRIP, b.shape[1]).transpose(1, 2).contiguous()
