"""Changes of products by LoRA adapters: `scale (x aᵀ) bᵀ`, each row with its own adapter or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotChange:
    """The change of one matrix by the adapter in one slot."""

    a: torch.Tensor
    """`[rank, in]`."""
    b: torch.Tensor
    """`[out, rank]`, of the same type."""
    scale: float


def adapted_linear(
    x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, changes: Sequence[Sequence[SlotChange | None]]
) -> torch.Tensor:
    """Add to `out` `[T, sum of widths]`, in place, what adapters change of its product with `x`.

    `x` is `[T, in]`, `slots` int32 `[T]` has each row's slot or -1; `changes` has, for each of the joined
    matrices in order, the change by each slot. All widths are those of B; sums are float32.
    """
    begin = 0
    for by_slot in changes:
        width = next(one.b.shape[0] for one in by_slot if one is not None)
        for row, slot in enumerate(slots.tolist()):
            change = by_slot[slot] if slot >= 0 else None
            if change is not None:
                inner = (change.a.float() * x[row].float()).sum(dim=-1) * change.scale
                added = (change.b.float() * inner).sum(dim=-1)
                place = out[row, begin : begin + width]
                place.copy_(place.float() + added)
        begin += width
    return out
