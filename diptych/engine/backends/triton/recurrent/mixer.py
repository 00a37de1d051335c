"""Interface of a kind of recurrent layers in the Triton step: its weights, the room it needs, its launches.

Names carry shapes: T tokens of a step (all sequences in a row), H hidden. The meaning of each kind is in
backends/torch/recurrent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from diptych.engine.backends.triton.linear import Products
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import PackedMixer
from diptych.engine.backends.triton.recurrent.mixer_room import MixerRoom
from diptych.engine.backends.triton.recurrent.step_states import LayerStates


class Mixer(Protocol):
    """Recurrent layer on the device."""

    def mix(self, x: torch.Tensor, states: LayerStates, room: MixerRoom, out: torch.Tensor) -> None:
        """Compute what the layer adds to the residual, before its norm, for `x [T, H]`, into `out [T, H]`.

        States are changed in their pages. Nothing is allocated, and nothing waits for the device.
        """
        ...


@dataclass(frozen=True)
class MixerKind:
    """A kind of recurrent layers. The shapes it takes are those of its row in the table (mixers.py)."""

    room: Callable[[Any], tuple[int, int]]
    """Numbers a token that a layer of some shape needs room for: of the model's dtype, and float32."""
    make: Callable[[Any, PackedMixer, Products, Operators, float], Mixer]
    """Makes the layer of a shape, its weights, and the epsilon of norms."""
    joined: Callable[[Any], Mapping[str, tuple[tuple[str, str | None], ...]]]
    """Products of a shape by name: matrices of one input and their biases, which are joined into one."""
