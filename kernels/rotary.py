"""Rotary position embedding (Su et al. 2021), in the halves pairing of GPT-NeoX and Hugging Face."""

from __future__ import annotations

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [tokens, heads, head_dim]` by the angles whose `cos` and `sin` are `[tokens, head_dim / 2]`.

    Lane i of a head is paired with lane i + head_dim / 2.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
