"""Recurrent layers as the native step takes them: their sizes, and which weights go where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from diptych.engine.kv.model_layout import kept_states
from diptych.engine.kv.state_layout import state_extents
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Matrix
from kernels.cpu import library as native

_MOST_TAPS = 16
"""Tokens that a convolution sees, at most (kernels/cpu/recurrent_kinds.h)."""
Part = tuple[Matrix | None, torch.Tensor | None]
"""A matrix with its bias; the matrix is None where the shape has none."""


@dataclass(frozen=True)
class PackedRecurrence:
    """The weights of a layer's recurrence, by their numbers in the native step."""

    matrices: Mapping[int, Sequence[Part]]
    """The parts of each matrix, in their order."""
    vectors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Numbers of any shape, in the order in which they are read."""


class _Kind(NamedTuple):
    """A kind of recurrence that is computed; both functions get its shape."""

    sizes: Callable[[Any], native.Recurrent]
    """Returns the sizes of a layer, but for the place of its states."""
    weights: Callable[[Any, Mapping[str, Any]], PackedRecurrence]
    """Sorts the tensors of a layer, given by the names of `RecurrentShape.tensors`."""


def _short_conv(shape: ShortConvShape) -> native.Recurrent:
    return native.Recurrent(kind=native.SHORT_CONV, channels=shape.width, taps=shape.taps)


def _short_conv_weights(_: ShortConvShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    return PackedRecurrence(_projections(tensors), _filter(tensors))


_KINDS: dict[type[RecurrentShape], _Kind] = {ShortConvShape: _Kind(_short_conv, _short_conv_weights)}


def _projections(tensors: Mapping[str, Any]) -> dict[int, Sequence[Part]]:
    """Return the matrices of a recurrence that has one into it and one out of it."""
    return {
        native.RECURRENT_IN: ((tensors["in_proj"], tensors.get("in_proj_bias")),),
        native.RECURRENT_OUT: ((tensors["out_proj"], tensors.get("out_proj_bias")),),
    }


def _filter(tensors: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return a convolution's filter `[taps, channels]` and its bias."""
    vectors = {native.FILTER: tensors["conv"].squeeze(1).t()}
    if "conv_bias" in tensors:
        vectors[native.FILTER_BIAS] = tensors["conv_bias"]
    return vectors


def lacks_recurrences(shape: ModelShape) -> Iterator[str]:
    """Yield what of the recurrences of a model of `shape` the native step does not compute, in words."""
    kinds = {layer.recurrent for layer in shape.layers if layer.recurrent is not None}
    for kind in sorted(kinds, key=lambda one: one.kind):
        if type(kind) not in _KINDS:
            yield f"the recurrence {kind.kind}"
        elif getattr(kind, "taps", 0) > _MOST_TAPS:
            yield f"convolutions over more than {_MOST_TAPS} tokens"


def native_recurrence(shape: ModelShape, layer: int) -> native.Recurrent:
    """Return the recurrence of layer number `layer` as the native step takes it; all zero: it has none."""
    own = shape.layers[layer].recurrent
    if own is None:
        return native.Recurrent()
    made = _KINDS[type(own)].sizes(own)
    made.place = state_extents(kept_states(shape))[layer][0]
    return made


def packed_recurrence(shape: RecurrentShape, tensors: Mapping[str, Matrix]) -> PackedRecurrence:
    """Return the tensors of a layer's recurrence by their numbers in the native step."""
    return _KINDS[type(shape)].weights(shape, tensors)
