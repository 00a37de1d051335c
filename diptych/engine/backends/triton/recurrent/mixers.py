"""The kinds of recurrent layers that the Triton step computes, by the type of their shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diptych.engine.backends.triton.packed_weights import PackedMixer, joined_product
from diptych.engine.backends.triton.recurrent.gated_delta import GATED_DELTA
from diptych.engine.backends.triton.recurrent.mamba import MAMBA
from diptych.engine.backends.triton.recurrent.mamba2 import MAMBA2
from diptych.engine.backends.triton.recurrent.mixer import MixerKind
from diptych.engine.backends.triton.recurrent.short_conv import SHORT_CONV
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Matrix

MIXERS: Mapping[type, MixerKind] = {
    ShortConvShape: SHORT_CONV,
    DeltaShape: GATED_DELTA,
    SpaceShape: MAMBA2,
    ScanShape: MAMBA,
}


def mixer_kind(shape: RecurrentShape) -> MixerKind:
    """Return the kind of a shape. Raises KeyError for one that is not computed (supports.py)."""
    return MIXERS[type(shape)]


def room_numbers(shape: ModelShape) -> tuple[int, int] | None:
    """Return the numbers a token of the room that a model's recurrent layers share, of the model's dtype and
    float32; None without such layers.
    """
    kept = [layer.recurrent for layer in shape.layers if layer.recurrent is not None]
    if not kept:
        return None
    each = [mixer_kind(one).room(one) for one in kept]
    return max(plain for plain, _ in each), max(wide for _, wide in each)


def pack_mixer(
    shape: ModelShape, layer: int, tensors: Mapping[str, Matrix], device: torch.device
) -> PackedMixer:
    """Put the tensors of layer `layer`'s recurrence on `device`, matrices of one input joined."""
    recurrent = shape.layers[layer].recurrent
    assert recurrent is not None
    joined, left = mixer_kind(recurrent).joined(recurrent), dict(tensors)
    products = {}
    for name, parts in joined.items():
        taken = [(left.pop(matrix), _bias(left, bias)) for matrix, bias in parts]
        products[name] = joined_product(device, *taken)
    plain = {name: tensor.to(device) for name, tensor in left.items() if isinstance(tensor, torch.Tensor)}
    assert len(plain) == len(left), "matrices in codes are products"
    return PackedMixer(products, plain)


def _bias(tensors: dict[str, Matrix], name: str | None) -> torch.Tensor | None:
    """Take a bias out of `tensors`; None where there is none."""
    bias = None if name is None else tensors.pop(name, None)
    assert bias is None or isinstance(bias, torch.Tensor)
    return bias
