"""Layer normalisation (Ba et al. 2016)."""

from __future__ import annotations

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Subtract the mean of `x [..., n]` over n, divide by the standard deviation, multiply by `weight [n]`
    and add `bias [n]`.

    Means are taken in float32 whatever the dtype, as is all that follows; only the result is rounded.
    """
    wide = x.float()
    wide = wide - wide.mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)
