"""Tables of the adapters that lie in slots on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChangeTable:
    """The changes of one product's `F` joined matrices by the adapters in `S` slots, on the device."""

    a: torch.Tensor
    """int64 `[F, S]`: address of A `[rank, in]`."""
    b: torch.Tensor
    """int64 `[F, S]`: address of B `[width, rank]`."""
    ranks: torch.Tensor
    """int32 `[F, S]`; 0: the slot does not change this matrix."""
    scales: torch.Tensor
    """float32 `[F, S]`."""
    begins: torch.Tensor
    """int32 `[F]`: first column of each matrix in the joined product."""
    widths: torch.Tensor
    """int32 `[F]`: columns of each."""
    widest: int
    """The largest of `widths`."""
