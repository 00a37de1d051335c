"""The shapes of layers whose state is a matrix a head or a few numbers a channel (`RecurrentShape`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Sizes = Iterator[tuple[str, tuple[int, ...]]]
"""Names of tensors with the shape of each."""


@dataclass(frozen=True)
class DeltaShape:
    """The gated delta rule (Yang et al. 2024), with a convolution before it and a gate behind.

    A head's state is a matrix that decays, and that each token corrects to give its value for its key.
    """

    key_heads: int
    value_heads: int
    """Heads of values, a multiple of those of keys, each of which serves several in a row."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the present one included."""
    apart: bool = False
    """Queries, keys and values have matrices and filters of their own."""
    largest_rate: float = 1.0
    """Rate of a correction whose sigmoid is one; with 2 a matrix may turn a value round (OLMo Hybrid)."""
    norm_eps: float | None = None
    """Epsilon of the output's norm; None: the model's."""

    @property
    def kind(self) -> str:
        """See `RecurrentShape.kind`."""
        return "gated delta rule"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries and keys of all key heads, and values of all value heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> list[int]:
        """Widths of what is made of a token: channels, gates, rates and steps of the decay."""
        return [self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads]

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, the oldest first, and a matrix a head."""
        return (self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)

    @property
    def into(self) -> tuple[str, ...]:
        """See `RecurrentShape.into`."""
        return (
            *(("q_proj", "k_proj", "v_proj") if self.apart else ("qkv_proj",)),
            "gate_proj",
            "rate",
            "step",
        )

    @property
    def within(self) -> tuple[str, ...]:
        """See `RecurrentShape.within`."""
        return ()

    def tensors(self, hidden: int) -> Sizes:
        """See `RecurrentShape.tensors`."""
        channels, values, heads, _ = self.projected
        keys = self.key_heads * self.key_dim
        parts = (("q", keys), ("k", keys), ("v", values)) if self.apart else (("qkv", channels),)
        for name, width in parts:
            yield f"{name}_proj", (width, hidden)
            yield f"{name}_conv" if self.apart else "conv", (width, 1, self.taps)
        yield "gate_proj", (values, hidden)
        yield "rate", (heads, hidden)
        yield "step", (heads, hidden)
        yield "decay", (heads,)
        yield "step_bias", (heads,)
        yield "norm", (self.value_dim,)
        yield "out_proj", (hidden, values)


@dataclass(frozen=True)
class SpaceShape:
    """Mamba-2 (Dao and Gu 2024): a head's state is a matrix that decays and that each token adds to."""

    heads: int
    head_dim: int
    groups: int
    """Groups of heads in a row that share what is written and read."""
    state: int
    """Numbers of a channel's state."""
    taps: int
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """Order of the output's norm, over each group's channels, and its gate; none: there is a gate only."""
    step_bounds: tuple[float, float] = (0.0, math.inf)
    """Least and largest step that a token makes."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False

    @property
    def kind(self) -> str:
        """See `RecurrentShape.kind`."""
        return "Mamba-2"

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> list[int]:
        """Widths of what is made of a token: gates, the convolution's channels, steps."""
        return [self.width, self.width + 2 * self.groups * self.state, self.heads]

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, the oldest first, and a matrix a head."""
        return (self.taps - 1, self.projected[1]), (self.heads, self.head_dim, self.state)

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
        _, channels, heads = self.projected
        yield "in_proj", (sum(self.projected), hidden)
        yield "conv", (channels, 1, self.taps)
        yield "decay", (heads,)
        yield "step_bias", (heads,)
        yield "skip", (heads,)
        yield "out_proj", (hidden, self.width)
        if self.norm != "none":
            yield "norm", (self.width,)
        if self.conv_bias:
            yield "conv_bias", (channels,)
        if self.in_bias:
            yield "in_proj_bias", (sum(self.projected),)
        if self.out_bias:
            yield "out_proj_bias", (hidden,)


@dataclass(frozen=True)
class ScanShape:
    """Mamba (Gu and Dao 2023), whose channels have a few numbers each, with Jamba's three norms within."""

    width: int
    """Channels."""
    state: int
    """Numbers of a channel's state."""
    taps: int
    rank: int
    """Width of what steps are made of."""
    conv_bias: bool = True
    bias: bool = False
    """The matrices into the layer and out of it have biases."""

    @property
    def kind(self) -> str:
        """See `RecurrentShape.kind`."""
        return "Mamba"

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, the oldest first, and the channels' numbers."""
        return (self.taps - 1, self.width), (self.width, self.state)

    @property
    def into(self) -> tuple[str, ...]:
        """See `RecurrentShape.into`."""
        return ("in_proj",)

    @property
    def within(self) -> tuple[str, ...]:
        """See `RecurrentShape.within`."""
        return ("x_proj", "step_proj")

    def tensors(self, hidden: int) -> Sizes:
        """See `RecurrentShape.tensors`."""
        yield "in_proj", (2 * self.width, hidden)
        yield "conv", (self.width, 1, self.taps)
        yield "x_proj", (self.rank + 2 * self.state, self.width)
        yield "step_proj", (self.width, self.rank)
        yield "step_bias", (self.width,)
        yield "step_norm", (self.rank,)
        yield "b_norm", (self.state,)
        yield "c_norm", (self.state,)
        yield "decay", (self.width, self.state)
        yield "skip", (self.width,)
        yield "out_proj", (hidden, self.width)
        if self.conv_bias:
            yield "conv_bias", (self.width,)
        if self.bias:
            yield "in_proj_bias", (2 * self.width,)
            yield "out_proj_bias", (hidden,)
