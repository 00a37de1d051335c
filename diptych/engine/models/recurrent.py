"""The shapes of recurrent layers: what a sequence keeps of all its tokens is a state of a fixed size.

A token reads the state that the one before it left and leaves its own, so that keys and values of single
tokens are not kept. Each kind has a shape here and its meaning in diptych/engine/backends/torch/recurrent.
States are float32 in every precision; that before the first token is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Sizes = Iterator[tuple[str, tuple[int, ...]]]
"""Names of tensors with the shape of each."""


class RecurrentShape(Protocol):
    """The sizes of one recurrent layer. Implementations are frozen dataclasses: layers are compared."""

    @property
    def kind(self) -> str:
        """Name of the kind, for people."""
        ...

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors that a sequence keeps of the layer."""
        ...

    @property
    def into(self) -> tuple[str, ...]:
        """Names of the matrices that read the layer's input, in the order of what they make of a token."""
        ...

    @property
    def within(self) -> tuple[str, ...]:
        """Names of the matrices that read what the recurrence makes of a token."""
        ...

    def tensors(self, hidden: int) -> Sizes:
        """Name and shape of each weight, below `layers.N.recurrent.`, in a model of `hidden` lanes.

        Those whose names end with `_proj` are matrices `[out, in]`, which quantised files may have in codes.
        """
        ...


@dataclass(frozen=True)
class ShortConvShape:
    """A gated convolution over the last few tokens (LFM2, Liquid AI 2025).

    Three projections B, C and x of the residual's width: `out(C * conv(B * x))`, a filter for each lane.
    """

    width: int
    """Lanes, those of the residual."""
    taps: int
    """Tokens that the filter sees, the present one included."""
    bias: bool = False
    """The filter and both projections have a bias."""

    @property
    def kind(self) -> str:
        """See `RecurrentShape.kind`."""
        return "short convolution"

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The last products `B * x`, the oldest first: `[taps - 1, width]`."""
        return ((self.taps - 1, self.width),) if self.taps > 1 else ()

    @property
    def into(self) -> tuple[str, ...]:
        """See `RecurrentShape.into`."""
        return ("in_proj",)

    @property
    def within(self) -> tuple[str, ...]:
        """See `RecurrentShape.within`."""
        return ()

    def tensors(self, hidden: int) -> Sizes:
        """See `RecurrentShape.tensors`."""
        yield "in_proj", (3 * self.width, hidden)
        yield "conv", (self.width, 1, self.taps)
        yield "out_proj", (hidden, self.width)
        if self.bias:
            yield "in_proj_bias", (3 * self.width,)
            yield "conv_bias", (self.width,)
            yield "out_proj_bias", (hidden,)
