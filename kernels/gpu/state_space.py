"""Mamba-2 over states in pages: single tokens by space_step.py, chunks by space_chunks.py."""

from __future__ import annotations

import torch

from kernels.gpu.space_chunks import space_chunks
from kernels.gpu.space_step import space_step
from kernels.recurrence import SpaceRule
from kernels.state_pages import StateRuns


def state_space(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance the sequences of `runs` by their rows and return the gated outputs in `out [T, heads * P]`;
    zeros for sequences that are not computed.

    `conv` is float32 `[T, channels]`, behind its activation, which may be overwritten; `mixed [T, X]` what
    `SpaceShape.projected` lists. States are `[heads, P, M]` from float `first` of a page on.
    """
    if len(conv) == 0:
        return out
    if runs.offsets is None:
        return space_step(conv, mixed, rule, runs, first, out=out)
    return space_chunks(conv, mixed, rule, runs, first, out=out)
