"""Attention of many sequences with one new token each: the decode half of paged attention.

The layout is that of kernels/paged_attention.py, whose functions mean the same, a sequence at a time.
"""

from __future__ import annotations

import torch

from kernels.kv_blocks import block_tokens, load_keys, load_values
from kernels.score_rule import capped, softmax_with_sinks


def paged_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of `query [rows, heads, head_dim]`, row r over the first `lengths[r]` positions.

    `tables` is int64 `[rows, n]`, padded with any valid block: what lies beyond a length is not read into the
    result, whatever it holds. `scales` are those of a cache in FP8. Scores and sums are float32.
    `scale`, `cap` and `sinks` as in paged_attention.py. Returns `[rows, heads, head_dim]`.
    """
    rows, heads, head_dim = query.shape
    count, kv_heads = tables.shape[1], blocks.shape[-2]
    block_size = block_tokens(blocks, head_dim)
    seen = torch.arange(count * block_size, device=query.device)
    hidden = seen >= lengths.unsqueeze(1)
    if window is not None:
        hidden |= seen < lengths.unsqueeze(1) - window
    keys = load_keys(blocks, layer, tables, head_dim, scales)
    keys = keys.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, head_dim, count * block_size)
    values = load_values(blocks, layer, tables, head_dim, scales)
    values = values.permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, count * block_size, head_dim)
    # Weight zero is not enough where a lane holds NaN: such values must go.
    values.masked_fill_(hidden[:, None, :, None], 0.0)

    scores = query.float().reshape(rows * kv_heads, heads // kv_heads, head_dim) @ keys
    scores = capped(scores * (head_dim**-0.5 if scale is None else scale), cap)
    scores = scores.view(rows, kv_heads, heads // kv_heads, -1)
    scores.masked_fill_(hidden[:, None, None, :], -torch.inf)
    per_head = None if sinks is None else sinks.view(kv_heads, heads // kv_heads)
    mixed = softmax_with_sinks(scores, per_head) @ values
    return mixed.reshape(rows, heads, head_dim).to(query.dtype)
