"""Constants of recurrent layers, as the operators of a GPU's step take them (kernels/gpu/delta_rule.py,
state_space.py, selective_scan.py).

What the operators mean is in diptych/engine/backends/torch/recurrent; states lie in pages (state_pages.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DELTA_CHUNK = 64
"""Rows of a prompt that the delta rule solves together, and numbers a head that each leaves between launches.
"""


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

    @property
    def columns(self) -> tuple[int, int, int]:
        """Numbers of a row of what is made of a token at which gates, rates and steps begin."""
        values = self.value_heads * self.value_dim
        gate = 2 * self.key_heads * self.key_dim + values
        return gate, gate + values, gate + values + self.value_heads


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

    @property
    def step_column(self) -> int:
        """Number of a row of what is made of a token at which steps begin."""
        return 2 * self.heads * self.head_dim + 2 * self.groups * self.state


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
