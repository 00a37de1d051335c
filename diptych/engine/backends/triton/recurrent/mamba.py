"""Mamba on a GPU: the convolution, products and norms that make steps, b and c, and the selective scan.

The meaning is backends/torch/recurrent/mamba.py.
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
from diptych.engine.models.recurrent_shapes import ScanShape
from kernels.recurrence import ScanRule


class MambaMixer:
    """See `Mixer`."""

    def __init__(
        self,
        shape: ScanShape,
        weights: PackedMixer,
        products: Products,
        operators: Operators,
        eps: float,
    ) -> None:
        self._shape, self._products, self._operators, self._eps = shape, products, operators, eps
        self._weights, tensors = weights.products, weights.tensors
        self._filter, self._bias = tensors["conv"].squeeze(1).contiguous(), tensors.get("conv_bias")
        self._norms = [tensors[f"{name}_norm"].float() for name in ("step", "b", "c")]
        self._rule = ScanRule(
            shape.width,
            shape.state,
            a=-tensors["decay"].float().exp(),
            step_bias=tensors["step_bias"].float(),
            skip=tensors["skip"].float(),
        )

    def mix(self, x: torch.Tensor, states: LayerStates, room: MixerRoom, out: torch.Tensor) -> None:
        """See `Mixer.mix`."""
        width, operators = self._shape.width, self._operators
        projected, inner, read, step, steps = room.typed(*_typed(self._shape))
        conv, parts, b, c = room.floats(*_floats(self._shape))
        self._products.linear(x, self._weights["in"], out=projected)
        seen, matrices = states.firsts
        for runs in states.runs:
            rows = runs.rows
            operators.causal_conv(
                projected[rows, :width], self._filter, self._bias, runs, seen, silu=True, out=conv[rows]
            )
        inner.copy_(conv)
        parts.copy_(self._products.linear(inner, self._weights["x"], out=read))
        begin = 0
        for weight, made in zip(self._norms, (step, b, c), strict=True):
            end = begin + len(weight)
            operators.rms_norm(parts[:, begin:end], weight, self._eps, out=made)
            begin = end
        self._products.linear(step, self._weights["step"], out=steps)
        for runs in states.runs:
            rows = runs.rows
            operators.selective_scan(
                conv[rows],
                steps[rows],
                b[rows],
                c[rows],
                projected[rows, width:],
                self._rule,
                runs,
                matrices,
                out=inner[rows],
            )
        self._products.linear(inner, self._weights["out"], out=out)


def _typed(shape: ScanShape) -> tuple[int, ...]:
    read = shape.rank + 2 * shape.state
    return 2 * shape.width, shape.width, read, shape.rank, shape.width


def _floats(shape: ScanShape) -> tuple[int, ...]:
    return shape.width, shape.rank + 2 * shape.state, shape.state, shape.state


def _room(shape: ScanShape) -> tuple[int, int]:
    return sum(_typed(shape)), sum(_floats(shape))


def _joined(shape: ScanShape) -> Mapping[str, tuple[tuple[str, str | None], ...]]:
    return {
        "in": (("in_proj", "in_proj_bias"),),
        "x": (("x_proj", None),),
        "step": (("step_proj", None),),
        "out": (("out_proj", "out_proj_bias"),),
    }


MAMBA = MixerKind(room=_room, make=MambaMixer, joined=_joined)
