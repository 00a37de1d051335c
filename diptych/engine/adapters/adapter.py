"""An adapter in memory: the change of each canonical matrix that it adapts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import RECURRENT

FIELDS = ("q", "k", "v", "q_gate", "o", "gate", "up", "down")
"""Canonical matrices (`LayerWeights`) that can have a change, beside those of recurrences."""


def adaptable_fields(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Return the canonical matrices of layer number `layer` that can have a change, as far as it has them."""
    recurrent = shape.layers[layer].recurrent
    if recurrent is None:
        return FIELDS
    return (*FIELDS, *(RECURRENT + name for name in (*recurrent.into, *recurrent.within, "out_proj")))


class BadAdapter(ValueError):
    """An adapter that cannot be computed with this model. The message names the field, tensor or module."""


@dataclass(frozen=True, eq=False)
class Delta:
    """The change of one matrix: `scale (x aᵀ) bᵀ` is added to the matrix' product with x, `[rows, in]`."""

    a: torch.Tensor
    """`[rank, in]`, float32 or bfloat16."""
    b: torch.Tensor
    """`[out, rank]`, rows in the canonical order, of the same type."""
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of all layers, on the CPU. Never modified."""

    layers: tuple[Mapping[str, Delta], ...]
    """The changes of each layer of the model, by their names in `adaptable_fields`."""

    def deltas(self) -> Iterator[Delta]:
        """Yield every change."""
        for layer in self.layers:
            yield from layer.values()

    @property
    def rank(self) -> int:
        """The largest rank of any change."""
        return max(delta.rank for delta in self.deltas())

    @property
    def num_bytes(self) -> int:
        """Size of all tensors; those that several changes share count once."""
        tensors = {tensor.data_ptr(): tensor for delta in self.deltas() for tensor in (delta.a, delta.b)}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
