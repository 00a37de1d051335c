"""Meaning of attention whose products are of FP8 (E4M3), over a cache in FP8 (fp8_cache.py).

- A row of queries, one token of one head, is rounded with a scale of its own: its largest number is E4M3's.
- Keys and values are multiplied as they lie in the cache; their scales multiply sums.
- A weight is rounded 256 times as large: the highest is 256, of E4M3's 448, and those below 2 ** -18 of it
  are lost. Contexts are walked in tiles, and a weight is measured by the highest score up to its tile's end:
  its rounding depends on the tile.
- Sums are float32, and so are the weights that they are divided by, which are not rounded.
"""

from __future__ import annotations

import torch

from kernels.fp8_cache import DTYPE, LARGEST
from kernels.kv_blocks import block_tokens, load_keys, load_values
from kernels.score_rule import capped

WEIGHT_SCALE = 256.0
_LEAST_PEAK = 1e-12


def round_queries(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `query [tokens, heads, head_dim]` rounded to E4M3, and float32 scales `[tokens, heads]`."""
    wide = query.float()
    scales = wide.abs().amax(-1).clamp(min=_LEAST_PEAK) / LARGEST
    return (wide / scales.unsqueeze(-1)).to(DTYPE), scales


def fp8_attention(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    start: int,
    window: int | None,
    scales: torch.Tensor,
    *,
    tile: int,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of `query [tokens, heads, head_dim]` over `blocks` in FP8, in tiles of `tile`.

    The other arguments and the result are those of `paged_attention`; `scales` float32 `[layers, 2,
    kv_heads]`.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, size, end = blocks.shape[-2], block_tokens(blocks, head_dim), start + tokens
    rounded, query_scales = round_queries(query)
    ids = table[: -(-end // size)]
    keys = load_keys(blocks, layer, ids, head_dim).float().permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)
    values = load_values(blocks, layer, ids, head_dim).float().permute(1, 0, 2, 3).reshape(keys.shape)
    of = torch.arange(heads, device=query.device) // (heads // kv_heads)
    key_scales, value_scales = scales[layer, :, of]
    factor = query_scales * key_scales * (head_dim**-0.5 if scale is None else scale)
    at = torch.arange(start, end, device=query.device)[:, None, None]

    peak = torch.full((tokens, heads, 1), -torch.inf, device=query.device)
    total, mixed = torch.zeros_like(peak), torch.zeros(query.shape, device=query.device)
    for begin in range(0, end, tile):
        stop = min(begin + tile, end)
        scores = torch.einsum("thd,hkd->thk", rounded.float(), keys[of, begin:stop]) * factor.unsqueeze(-1)
        seen = torch.arange(begin, stop, device=query.device)
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        scores = capped(scores, cap).masked_fill(hidden, -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, faded = (scores - anchor).exp() * WEIGHT_SCALE, (peak - anchor).exp()
        total = total * faded + weights.sum(-1, keepdim=True)
        part = torch.einsum("thk,hkd->thd", weights.to(DTYPE).float(), values[of, begin:stop])
        mixed, peak = mixed * faded + part, higher
    if sinks is not None:
        sink = sinks.float()[None, :, None]
        higher = torch.maximum(peak, sink)
        faded = (peak - higher).exp()
        mixed, total = mixed * faded, total * faded + (sink - higher).exp() * WEIGHT_SCALE
    result: torch.Tensor = mixed * value_scales[:, None] / total
    return result.to(query.dtype)
