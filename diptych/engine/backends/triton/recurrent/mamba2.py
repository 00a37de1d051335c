"""Mamba-2 on a GPU: a product, the convolution, the state space with its gate and norm, a product.

The meaning is backends/torch/recurrent/mamba2.py.
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
from diptych.engine.models.recurrent_shapes import SpaceShape
from kernels.recurrence import SpaceRule


class Mamba2Mixer:
    """See `Mixer`."""

    def __init__(
        self,
        shape: SpaceShape,
        weights: PackedMixer,
        products: Products,
        operators: Operators,
        eps: float,
    ) -> None:
        self._shape, self._products, self._operators = shape, products, operators
        self._in, self._out = weights.products["in"], weights.products["out"]
        tensors = weights.tensors
        self._filter, self._bias = tensors["conv"].squeeze(1).contiguous(), tensors.get("conv_bias")
        self._rule = SpaceRule(
            shape.heads,
            shape.head_dim,
            shape.groups,
            shape.state,
            a=-tensors["decay"].float().exp(),
            step_bias=tensors["step_bias"].float(),
            skip=tensors["skip"].float(),
            step_bounds=shape.step_bounds,
            eps=eps,
            norm=tensors.get("norm"),
            order=shape.norm,
        )

    def mix(self, x: torch.Tensor, states: LayerStates, room: MixerRoom, out: torch.Tensor) -> None:
        """See `Mixer.mix`."""
        shape, operators = self._shape, self._operators
        projected, mixed = room.typed(sum(shape.projected), shape.width)
        channels = shape.projected[1]
        (conv,) = room.floats(channels)
        self._products.linear(x, self._in, out=projected)
        inner = projected[:, shape.width : shape.width + channels]
        seen, matrices = states.firsts
        for runs in states.runs:
            rows = runs.rows
            operators.causal_conv(
                inner[rows], self._filter, self._bias, runs, seen, silu=True, out=conv[rows]
            )
            operators.state_space(conv[rows], projected[rows], self._rule, runs, matrices, out=mixed[rows])
        self._products.linear(mixed, self._out, out=out)


def _room(shape: SpaceShape) -> tuple[int, int]:
    return sum(shape.projected) + shape.width, shape.projected[1]


def _joined(shape: SpaceShape) -> Mapping[str, tuple[tuple[str, str | None], ...]]:
    return {"in": (("in_proj", "in_proj_bias"),), "out": (("out_proj", "out_proj_bias"),)}


MAMBA2 = MixerKind(room=_room, make=Mamba2Mixer, joined=_joined)
