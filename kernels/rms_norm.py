"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, mean_square: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide `x [..., n]` by its root mean square over n, and multiply by `weight [n]`.

    The mean is taken in float32 whatever the dtype: squares of bfloat16 have three significant digits. A
    float32 weight multiplies before the result is rounded to the dtype of `x`, one of that dtype after.
    `mean_square [..., 1]`, float32, is taken in place of that of `x` where `x` is a part of what is
    normalised.
    """
    wide = x.float()
    if mean_square is None:
        mean_square = wide.square().mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(mean_square + eps)
    if weight.dtype == torch.float32:
        return (weight * wide).to(x.dtype)
    return weight * wide.to(x.dtype)
