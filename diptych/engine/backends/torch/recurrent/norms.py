"""Norms within recurrent layers, in float32: of parts of a row, and of keys and queries by their length."""

from __future__ import annotations

import torch


def group_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """Return float32 `x [..., n]`, each of `groups` parts of a row divided by its root mean square, times
    `weight [n]`.
    """
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    normed = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    return weight.float() * normed.reshape(x.shape)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `x / |x|` over the last axis; 1e-6 is added to the square of the length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
