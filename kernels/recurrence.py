"""Constants of recurrent layers, and where their states lie: what the operators of a GPU's step are given.

What the operators mean is in diptych/engine/backends/torch/recurrent. States are float32; a layer's states of
one sequence lie in a page of whole blocks that need not follow one another, so that float number f of a page
is number `f % block_floats` of block `table[f // block_floats]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

NO_PAGE = -1
"""First block of a page that is not there: before the first token there are zeros, and nothing is written."""


@dataclass(frozen=True)
class StatePages:
    """States of one kind of one layer within all pages of a memory."""

    memory: torch.Tensor
    """float32 `[blocks, floats]`; blocks may lie apart."""
    block_floats: int
    """Floats of a block that pages use."""
    begin: int = 0
    """First float of the states in a page."""

    def behind(self, floats: int) -> StatePages:
        """Return the states that begin so many floats later."""
        return replace(self, begin=self.begin + floats)


@dataclass(frozen=True)
class RowPages:
    """Pages of rows that are one token each of B sequences."""

    read: torch.Tensor
    """int32 `[B, n]`: blocks of the pages with the states before; NO_PAGE first where there are none."""
    written: torch.Tensor
    """int32 `[B, n]`: blocks of the pages for the states behind; NO_PAGE first where none are kept. A row may
    write the page that it reads.
    """


@dataclass(frozen=True)
class PieceRows:
    """Several tokens each of S sequences, whose rows follow one another, cut where states are kept."""

    read: torch.Tensor
    """int32 `[S, n]`, as that of RowPages."""
    firsts: torch.Tensor
    """int32 `[S + 1]`: number of each sequence's first piece, and the number of pieces; an equal one follows
    where a sequence is padding.
    """
    offsets: torch.Tensor
    """int32 `[P + 1]`: first row of each piece, and the end; the first one is 0."""
    written: torch.Tensor
    """int32 `[P, n]`: blocks of the pages for the states behind each piece, as those of RowPages."""
    max_rows: int
    """Rows of the longest sequence, or more."""


@dataclass(frozen=True)
class DeltaRule:
    """Constants of a layer of the gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    speed: torch.Tensor
    """float32 `[value_heads]`: logarithms of decays are this times `-softplus(step + step_bias)`."""
    step_bias: torch.Tensor
    """float32 `[value_heads]`."""
    norm: torch.Tensor
    """`[value_dim]`: weight of the output's norm."""
    eps: float
    largest_rate: float = 1.0


@dataclass(frozen=True)
class SpaceRule:
    """Constants of a layer of Mamba-2."""

    heads: int
    head_dim: int
    groups: int
    state: int
    a: torch.Tensor
    """float32 `[heads]`, negative."""
    step_bias: torch.Tensor
    """float32 `[heads]`."""
    skip: torch.Tensor
    """float32 `[heads]`."""
    step_bounds: tuple[float, float]
    eps: float
    norm: torch.Tensor | None
    """`[heads * head_dim]`."""
    order: Literal["after_gate", "before_gate", "none"] = "after_gate"


@dataclass(frozen=True)
class ScanRule:
    """Constants of a layer of Mamba."""

    width: int
    state: int
    a: torch.Tensor
    """float32 `[width, state]`, negative."""
    step_bias: torch.Tensor
    """float32 `[width]`."""
    skip: torch.Tensor
    """float32 `[width]`."""
