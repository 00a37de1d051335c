"""The gated delta rule over states in pages: single tokens by delta_step.py, chunks by delta_chunks.py."""

from __future__ import annotations

import torch

from kernels.gpu.delta_chunks import delta_chunks
from kernels.gpu.delta_step import delta_step
from kernels.recurrence import DeltaRule
from kernels.state_pages import StateRuns


def delta_rule(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    runs: StateRuns,
    first: int,
    *,
    rooms: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance the sequences of `runs` by their rows and return the gated outputs in `out [T, value heads *
    V]`; zeros for sequences that are not computed.

    `conv` is float32 `[T, channels]`, behind its activation, which may be overwritten; `mixed [T, X]` what
    `DeltaShape.projected` lists; `rooms` are those of `delta_chunks`. States are `[value heads, D, V]` from
    float `first` of a page on.
    """
    if len(conv) == 0:
        return out
    if runs.offsets is None:
        return delta_step(conv, mixed, rule, runs, first, out=out)
    return delta_chunks(conv, mixed, rule, runs, first, rooms=rooms, out=out)
