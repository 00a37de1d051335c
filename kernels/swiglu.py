"""The gated activation of the feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of `gate_up [tokens, 2 * n]`, the gate in the first half: `[tokens, n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
