"""Recurrent layers as the native step takes them: their sizes, and which weights go where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    vectors: Mapping[int, torch.Tensor]
    """Numbers of any shape, in the order in which they are read."""


def _short_conv(shape: ShortConvShape, _: float) -> native.Recurrent:
    return native.Recurrent(kind=native.SHORT_CONV, channels=shape.width, taps=shape.taps)


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


_NORMS = {"none": 0, "after_gate": 1, "before_gate": 2}
_SIZES: dict[type[RecurrentShape], Callable[[Any, float], native.Recurrent]] = {
    ShortConvShape: _short_conv,
    DeltaShape: _delta,
    SpaceShape: _mamba2,
    ScanShape: _mamba,
}
"""Kinds that are computed: `sizes(shape, eps)` returns the sizes of a layer but for the place of its states.
`eps` is the epsilon of models' norms.
"""
_VECTORS = {
    "conv_bias": native.FILTER_BIAS,
    "step_bias": native.STEP_BIAS,
    "skip": native.SKIP,
    "norm": native.RECURRENT_NORM,
    "step_norm": native.STEP_NORM,
    "b_norm": native.B_NORM,
    "c_norm": native.C_NORM,
}
"""Vectors that are taken as they are."""


def lacks_recurrences(shape: ModelShape) -> Iterator[str]:
    """Yield what of the recurrences of a model of `shape` the native step does not compute, in words."""
    kinds = {layer.recurrent for layer in shape.layers if layer.recurrent is not None}
    for kind in sorted(kinds, key=lambda one: one.kind):
        if type(kind) not in _SIZES:
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
    made = _SIZES[type(own)](own, shape.rms_eps)
    made.place = state_extents(kept_states(shape))[layer][0]
    return made


def recurrent_products(shape: RecurrentShape) -> dict[int, list[str]]:
    """Return the products of a recurrence, and the matrices that each joins, by the names of
    `RecurrentShape.tensors`.
    """
    side = [name for name in shape.into if not name.endswith("_proj")]
    within = zip((native.RECURRENT_INNER, native.RECURRENT_STEPS), shape.within, strict=False)
    products = {
        native.RECURRENT_IN: [name for name in shape.into if name not in side],
        native.RECURRENT_SIDE: side,
        **{which: [name] for which, name in within},
        native.RECURRENT_OUT: ["out_proj"],
    }
    return {which: names for which, names in products.items() if names}


def packed_recurrence(shape: RecurrentShape, tensors: Mapping[str, Any]) -> PackedRecurrence:
    """Return the tensors of a layer's recurrence by their numbers in the native step."""

    def part(name: str) -> Part:
        # The bias `step_bias` is none of the matrix `step`: it is added where steps are made.
        return tensors[name], tensors.get(f"{name}_bias") if name.endswith("_proj") else None

    filters = [tensors[name] for name in ("conv", "q_conv", "k_conv", "v_conv") if name in tensors]
    vectors = {number: tensors[name] for name, number in _VECTORS.items() if name in tensors}
    vectors[native.FILTER] = torch.cat(filters).squeeze(1).t()
    if "decay" in tensors:
        vectors[native.DECAY] = -tensors["decay"].float().exp().t()
    products = recurrent_products(shape)
    return PackedRecurrence({which: list(map(part, names)) for which, names in products.items()}, vectors)
