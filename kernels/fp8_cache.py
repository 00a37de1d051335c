"""KV cache in eight bits (E4M3: Micikevicius et al. 2022, "FP8 formats for deep learning").

A cache of such numbers has scales, float32 `[layers, 2 (keys, values), kv_heads]`: what is meant is the
number times the scale of its layer and head. Every operator that reads or writes a cache takes them; without
them the cache has the computation's own dtype.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


def quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise `x [tokens, kv_heads, head_dim]` to E4M3 by `scale [kv_heads]`.

    Numbers beyond E4M3's largest are cut off there: it has no infinity, and NaN would spread.
    """
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(DTYPE)
