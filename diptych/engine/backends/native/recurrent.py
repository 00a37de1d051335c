"""Recurrent layers as the native step takes them: their sizes, and which weights go where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from diptych.engine.kv.model_layout import kept_states
from diptych.engine.kv.state_layout import state_extents
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Matrix
from kernels.cpu import library as native

_MOST_TAPS = 16
"""Tokens that a convolution sees, at most (kernels/cpu/recurrent_kinds.h)."""
_MOST_SCAN_NUMBERS = 256
"""Numbers of a channel of Mamba, at most (kernels/cpu/recurrent_kinds.h)."""
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

    sizes: Callable[[Any, float], native.Recurrent]
    """Returns the sizes of a layer but for the place of its states; models' norms have this epsilon."""
    weights: Callable[[Any, Mapping[str, Any]], PackedRecurrence]
    """Sorts the tensors of a layer, given by the names of `RecurrentShape.tensors`."""


def _short_conv(shape: ShortConvShape, _: float) -> native.Recurrent:
    return native.Recurrent(kind=native.SHORT_CONV, channels=shape.width, taps=shape.taps)


def _short_conv_weights(_: ShortConvShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    return PackedRecurrence(_projections(tensors), _filter(tensors))


def _delta(shape: DeltaShape, eps: float) -> native.Recurrent:
    return native.Recurrent(
        kind=native.GATED_DELTA,
        channels=shape.channels,
        taps=shape.taps,
        groups=shape.key_heads,
        heads=shape.value_heads,
        state=shape.key_dim,
        width=shape.value_dim,
        apart=shape.apart,
        largest_rate=shape.largest_rate,
        epsilon=eps if shape.norm_eps is None else shape.norm_eps,
    )


def _delta_weights(shape: DeltaShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    parts = ("q", "k", "v") if shape.apart else ("qkv",)
    filters = [tensors[f"{part}_conv" if shape.apart else "conv"] for part in parts]
    matrices: dict[int, Sequence[Part]] = {
        native.RECURRENT_IN: [(tensors[f"{part}_proj"], None) for part in (*parts, "gate")],
        native.RECURRENT_SIDE: [(tensors[name], None) for name in ("rate", "step")],
        native.RECURRENT_OUT: [(tensors["out_proj"], None)],
    }
    vectors = {
        native.FILTER: torch.cat(filters).squeeze(1).t(),
        native.DECAY: -tensors["decay"].float().exp(),
        native.STEP_BIAS: tensors["step_bias"],
        native.RECURRENT_NORM: tensors["norm"],
    }
    return PackedRecurrence(matrices, vectors)


def _mamba2(shape: SpaceShape, eps: float) -> native.Recurrent:
    return native.Recurrent(
        kind=native.MAMBA2,
        channels=shape.projected[1],
        taps=shape.taps,
        groups=shape.groups,
        heads=shape.heads,
        state=shape.state,
        width=shape.head_dim,
        norm=_NORMS[shape.norm],
        epsilon=eps,
        least_step=shape.step_bounds[0],
        largest_step=shape.step_bounds[1],
    )


def _mamba2_weights(_: SpaceShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    vectors = {
        native.DECAY: -tensors["decay"].float().exp(),
        native.STEP_BIAS: tensors["step_bias"],
        native.SKIP: tensors["skip"],
    }
    if "norm" in tensors:
        vectors[native.RECURRENT_NORM] = tensors["norm"]
    return PackedRecurrence(_projections(tensors), {**_filter(tensors), **vectors})


def _mamba(shape: ScanShape, eps: float) -> native.Recurrent:
    return native.Recurrent(
        kind=native.MAMBA,
        channels=shape.width,
        taps=shape.taps,
        state=shape.state,
        width=shape.width,
        rank=shape.rank,
        epsilon=eps,
    )


def _mamba_weights(_: ScanShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    matrices = {
        **_projections(tensors),
        native.RECURRENT_INNER: [(tensors["x_proj"], None)],
        native.RECURRENT_STEPS: [(tensors["step_proj"], None)],
    }
    vectors = {
        native.DECAY: -tensors["decay"].float().exp().t(),
        native.STEP_BIAS: tensors["step_bias"],
        native.SKIP: tensors["skip"],
        native.STEP_NORM: tensors["step_norm"],
        native.B_NORM: tensors["b_norm"],
        native.C_NORM: tensors["c_norm"],
    }
    return PackedRecurrence(matrices, {**_filter(tensors), **vectors})


_NORMS = {"none": 0, "after_gate": 1, "before_gate": 2}
_KINDS: dict[type[RecurrentShape], _Kind] = {
    ShortConvShape: _Kind(_short_conv, _short_conv_weights),
    DeltaShape: _Kind(_delta, _delta_weights),
    SpaceShape: _Kind(_mamba2, _mamba2_weights),
    ScanShape: _Kind(_mamba, _mamba_weights),
}


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
        elif isinstance(kind, ScanShape) and kind.state > _MOST_SCAN_NUMBERS:
            yield f"more than {_MOST_SCAN_NUMBERS} numbers a channel of Mamba"


def native_recurrence(shape: ModelShape, layer: int) -> native.Recurrent:
    """Return the recurrence of layer number `layer` as the native step takes it; all zero: it has none."""
    own = shape.layers[layer].recurrent
    if own is None:
        return native.Recurrent()
    made = _KINDS[type(own)].sizes(own, shape.rms_eps)
    made.place = state_extents(kept_states(shape))[layer][0]
    return made


def packed_recurrence(shape: RecurrentShape, tensors: Mapping[str, Matrix]) -> PackedRecurrence:
    """Return the tensors of a layer's recurrence by their numbers in the native step."""
    return _KINDS[type(shape)].weights(shape, tensors)
