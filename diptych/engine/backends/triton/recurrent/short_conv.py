"""The short convolution of LFM2 on a GPU: a product, one launch of the gated convolution, a product.

The meaning is backends/torch/recurrent/short_conv.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diptych.engine.backends.triton.linear import Products
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import PackedMixer
from diptych.engine.backends.triton.recurrent.mixer import MixerKind
from diptych.engine.backends.triton.recurrent.mixer_room import MixerRoom
from diptych.engine.backends.triton.recurrent.step_states import LayerStates
from diptych.engine.models.recurrent import ShortConvShape


class ShortConvMixer:
    """See `Mixer`."""

    def __init__(
        self,
        shape: ShortConvShape,
        weights: PackedMixer,
        products: Products,
        operators: Operators,
        eps: float,
    ) -> None:
        self._width = shape.width
        self._products, self._operators = products, operators
        self._in, self._out = weights.products["in"], weights.products["out"]
        self._filter = weights.tensors["conv"].squeeze(1).contiguous()
        self._bias = weights.tensors.get("conv_bias")

    def mix(self, x: torch.Tensor, states: LayerStates, room: MixerRoom, out: torch.Tensor) -> None:
        """See `Mixer.mix`."""
        projected, mixed = room.typed(3 * self._width, self._width)
        self._products.linear(x, self._in, out=projected)
        for runs in states.runs:
            self._operators.short_conv(
                projected[runs.rows],
                self._filter,
                self._bias,
                runs,
                *states.firsts[:1] or (0,),
                out=mixed[runs.rows],
            )
        self._products.linear(mixed, self._out, out=out)


def _room(shape: ShortConvShape) -> tuple[int, int]:
    return 4 * shape.width, 0


def _joined(shape: ShortConvShape) -> Mapping[str, tuple[tuple[str, str | None], ...]]:
    return {"in": (("in_proj", "in_proj_bias"),), "out": (("out_proj", "out_proj_bias"),)}


SHORT_CONV = MixerKind(_room, ShortConvMixer, _joined)
