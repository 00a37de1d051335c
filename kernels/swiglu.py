"""The gated activation of the feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional

_SLOPE = 1.702
"""Factor at which `x sigmoid(x)` comes near to the exact GELU."""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of `gate_up [tokens, 2 * n]`, the gate in the first half: `[tokens, n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def clamped_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return `g * sigmoid(1.702 g) * (u + 1)` of `gate_up [tokens, 2 * n]`: `[tokens, n]` (gpt-oss, 2025).

    g is the gate, the first half, at most `limit`; u the rest, between `-limit` and `limit`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(_SLOPE * gate) * (up + 1)
