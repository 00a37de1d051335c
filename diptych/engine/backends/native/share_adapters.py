"""The products of a rank's share of a model that an adapter changes.

Queries, keys and values of a rank's parts are one product; output, gate, up and down are a product a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.adapters.part_adapter import part_adapter
from diptych.engine.backends.native.adapters import (
    PRODUCTS,
    AdaptedProduct,
    has_uneven_strips,
    present_fields,
)
from diptych.engine.backends.native.share import Share
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part
from diptych.engine.weights.canonical import layer_shapes
from diptych.engine.weights.part_weights import cut_of
from kernels.cpu import library as native


def share_products(share: Share, adapter: Adapter) -> Iterator[AdaptedProduct]:
    """Yield the products of the layers of `share`'s stage that an adapter of the whole model changes."""
    first, last = share.parts[0], share.parts[-1]
    together = replace(
        first,
        heads=range(first.heads.start, last.heads.stop),
        kv_heads=range(first.kv_heads.start, last.kv_heads.stop),
    )
    yield from _products(share, adapter, together, 0, (native.QKV,))
    for own, part in enumerate(share.parts):
        yield from _products(share, adapter, part, own, (native.OUTPUT, native.GATE_UP, native.DOWN))


def _products(
    share: Share, adapter: Adapter, part: Part, own: int, wanted: tuple[int, ...]
) -> Iterator[AdaptedProduct]:
    shape = share.whole
    fields = [field for which in wanted for field in PRODUCTS[which]]
    cut = part_adapter(adapter, shape, part, share.stage.layers, fields)
    for index, (number, layer) in enumerate(zip(share.stage.layers, cut.layers, strict=True)):
        sizes = dict(layer_shapes(shape, number))
        for which in wanted:
            if any(field in layer for field in PRODUCTS[which]):
                present = present_fields(PRODUCTS[which], sizes)
                rows = [_rows(field, sizes[field][0], part, shape) for field in present]
                # By the width of a head, and not by how many a rank has: an order of sums depends on it.
                uneven = has_uneven_strips([shape.head_dim] if which == native.QKV else rows)
                yield AdaptedProduct(index, which, present, rows, layer, uneven, own)


def _rows(field: str, whole: int, part: Part, shape: ModelShape) -> int:
    """Return the rows that a part has of a matrix with so many."""
    rows = cut_of(field, part, shape).rows
    return whole if rows is None else len(rows)
