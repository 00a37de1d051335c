"""The interface of a recurrent layer in torch, and the layer that a shape asks for.

Names carry shapes: T tokens of a step (all sequences in a row), H hidden, B sequences with N tokens each, X
and Y what the layer makes of a token before and behind its recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from diptych.engine.backends.torch.recurrent.short_conv import ShortConv
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape

States = tuple[torch.Tensor, ...]
"""States of B sequences: float32 `[B, *size]` for each of `RecurrentShape.states`."""
Linear = Callable[..., torch.Tensor]
"""`linear(input, matrix, bias)`, as torch.nn.functional.linear has it."""


class RecurrentLayer(Protocol):
    """A layer whose tokens read the state that the one before them left.

    `project` and `output` are computed for all rows of a step at once, each by itself. What `advance` gives
    of a token depends on that token and the state before it, in the same bits however a text is cut.
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
            return ShortConv(shape, tensors, linear)
        case _:
            raise TypeError(f"no layer of {shape.kind}")
