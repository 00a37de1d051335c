"""The gated delta rule on a GPU: a product, the convolution, the rule with its norm and gate, a product.

The meaning is backends/torch/recurrent/gated_delta.py.
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
from diptych.engine.models.recurrent_shapes import DeltaShape
from kernels.recurrence import DELTA_CHUNK, DeltaRule


class GatedDeltaMixer:
    """See `Mixer`."""

    def __init__(
        self,
        shape: DeltaShape,
        weights: PackedMixer,
        products: Products,
        operators: Operators,
        eps: float,
    ) -> None:
        self._shape, self._products, self._operators = shape, products, operators
        self._in, self._out = weights.products["in"], weights.products["out"]
        tensors = weights.tensors
        filters = [tensors[f"{part}_conv" if part else "conv"] for part in _parts(shape)]
        self._filter = torch.cat(filters).squeeze(1).contiguous()
        self._rule = DeltaRule(
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            speed=tensors["decay"].float().exp(),
            step_bias=tensors["step_bias"].float(),
            norm=tensors["norm"],
            eps=eps if shape.norm_eps is None else shape.norm_eps,
            largest_rate=shape.largest_rate,
        )

    def mix(self, x: torch.Tensor, states: LayerStates, room: MixerRoom, out: torch.Tensor) -> None:
        """See `Mixer.mix`."""
        channels, operators = self._shape.channels, self._operators
        projected, mixed = room.typed(*_typed(self._shape))
        conv, keys, within = room.floats(*_floats(self._shape))
        self._products.linear(x, self._in, out=projected)
        seen, matrices = states.firsts
        for runs in states.runs:
            rows = runs.rows
            operators.causal_conv(
                projected[rows, :channels], self._filter, None, runs, seen, silu=True, out=conv[rows]
            )
            operators.delta_rule(
                conv[rows],
                projected[rows],
                self._rule,
                runs,
                matrices,
                rooms=(keys[rows], within[rows]),
                out=mixed[rows],
            )
        self._products.linear(mixed, self._out, out=out)


def _parts(shape: DeltaShape) -> tuple[str, ...]:
    """Return the names of matrices and filters of queries, keys and values; empty where they are one."""
    return ("q", "k", "v") if shape.apart else ("",)


def _typed(shape: DeltaShape) -> tuple[int, int]:
    return sum(shape.projected), shape.value_heads * shape.value_dim


def _floats(shape: DeltaShape) -> tuple[int, int, int]:
    return shape.channels, shape.value_heads * shape.key_dim, shape.value_heads * DELTA_CHUNK


def _room(shape: DeltaShape) -> tuple[int, int]:
    return sum(_typed(shape)), sum(_floats(shape))


def _joined(shape: DeltaShape) -> Mapping[str, tuple[tuple[str, str | None], ...]]:
    read = [f"{part or 'qkv'}_proj" for part in _parts(shape)]
    return {
        "in": tuple((name, None) for name in (*read, "gate_proj", "rate", "step")),
        "out": (("out_proj", None),),
    }


GATED_DELTA = MixerKind(room=_room, make=GatedDeltaMixer, joined=_joined)
