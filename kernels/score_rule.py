"""Variations of attention's softmax: capped scores (Gemma 2), and sinks (gpt-oss; Xiao et al. 2023)."""

from __future__ import annotations

import torch


def capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return `cap * tanh(scores / cap)`, or the scores as they are without a cap."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of `scores [..., n]` over n; each row's sink `[...]`, if given, takes its share too.

    The weights of a row sum to less than one by what its sink takes.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
