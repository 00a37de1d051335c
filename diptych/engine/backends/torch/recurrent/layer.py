"""The interface of a recurrent layer in torch, and the layer that a shape asks for.

Names carry shapes: T tokens of a step (all sequences in a row), H hidden, B sequences with N tokens each, X
and Y what the layer makes of a token before and behind its recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from diptych.engine.backends.torch.recurrent.gated_delta import GatedDelta
from diptych.engine.backends.torch.recurrent.mamba import Mamba
from diptych.engine.backends.torch.recurrent.mamba2 import Mamba2
from diptych.engine.backends.torch.recurrent.short_conv import ShortConv
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape

States = tuple[torch.Tensor, ...]
"""States of B sequences: float32 `[B, *size]` for each of `RecurrentShape.states`."""
Linear = Callable[..., torch.Tensor]
"""`linear(input, matrix, bias)`, as torch.nn.functional.linear has it."""


class RecurrentLayer(Protocol):
    """A layer whose tokens read the state that the one before them left.

    `project` and `output` are computed for all rows of a step at once, each by itself. What `advance` gives
    of a token depends on that token and the state before it: in the same bits however a text is cut, or, of
    layers that compute many rows at once, if calls begin at multiples of `PIECE_ROWS` (pieces.py).
    """

    def project(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return what the recurrence reads of each token, `[T, X]`."""
        ...

    def advance(self, mixed_BNX: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """Return `[B, N, Y]` of the tokens, and the states behind the last of them; `states` stay as they
        are.
        """
        ...

    def output(self, mixed_TY: torch.Tensor) -> torch.Tensor:
        """Return what the layer adds to the residual, before its norm: `[T, H]`."""
        ...


def make_layer(
    shape: RecurrentShape, tensors: Mapping[str, torch.Tensor], linear: Linear, eps: float
) -> RecurrentLayer:
    """Return the layer of `shape` over its weights, by the names of `RecurrentShape.tensors`, matrices dense.

    `eps` is the epsilon of norms. Raises TypeError for a shape of no kind that is computed.
    """
    match shape:
        case ShortConvShape():
            return ShortConv(tensors, linear)
        case DeltaShape():
            return GatedDelta(shape, tensors, linear, eps)
        case SpaceShape():
            return Mamba2(shape, tensors, linear, eps)
        case ScanShape():
            return Mamba(shape, tensors, linear, eps)
        case _:
            raise TypeError(f"no layer of {shape.kind}")
