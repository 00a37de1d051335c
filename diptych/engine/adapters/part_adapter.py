"""The share of an adapter that a part of a model computes.

By rows     B of q, k, v (heads), of gate and up (inner numbers); A is whole in every part
By columns  A of o (heads) and down (inner numbers); B is whole

`B (A x)` of a matrix that is cut by columns is the sum over the parts of `B (A_p x_p)`. Each part adds its
own to what it gives, which goes through the exchange as ever. So the degree changes no bit of an adapted row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diptych.engine.adapters.adapter import FIELDS, Adapter, Delta
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part
from diptych.engine.weights.part_weights import cut_of


def part_adapter(
    adapter: Adapter, shape: ModelShape, part: Part, layers: range, fields: Collection[str] = FIELDS
) -> Adapter:
    """Return the changes that `part` of a model of `shape` has of `fields` in `layers`, those of a narrower
    model of these layers. Its tensors hold no more than that.
    """
    return Adapter(tuple(_cut_layer(adapter.layers[number], shape, part, fields) for number in layers))


def _cut_layer(
    layer: Mapping[str, Delta], shape: ModelShape, part: Part, fields: Collection[str]
) -> Mapping[str, Delta]:
    return {field: _cut(field, delta, shape, part) for field, delta in layer.items() if field in fields}


def _cut(field: str, delta: Delta, shape: ModelShape, part: Part) -> Delta:
    cut = cut_of(field, part, shape)
    a, b = delta.a, delta.b
    if cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop].clone()
    if cut.rows is not None:
        b = b[cut.rows.start : cut.rows.stop].clone()
    return Delta(a, b, delta.scale)


def part_adapters(
    adapter: Adapter, shape: ModelShape, parts: Sequence[Part], layers: range
) -> tuple[Adapter, ...]:
    """Return what each of `parts` has of an adapter in `layers`."""
    return tuple(part_adapter(adapter, shape, part, layers) for part in parts)
