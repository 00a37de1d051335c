"""Attention over keys and values in paged blocks, and the write of both.

`blocks` is a whole KV memory (kv_blocks.py). Position p of a sequence lies in block `table[p // block_size]`,
lane `p % block_size`. Both functions work in place on any subset of blocks in any order.
"""

from __future__ import annotations

import torch

from kernels.kv_blocks import block_tokens, load_keys, load_values, write_kv_rows
from kernels.score_rule import capped, softmax_with_sinks


def write_kv(
    blocks: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    start: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Store `keys` and `values [tokens, kv_heads, head_dim]` of positions `start, start + 1, ...` of one
    sequence.

    `table` is int64 and covers the last position. `scales` are those of a cache in FP8 (fp8_cache.py).
    """
    block_size = block_tokens(blocks, keys.shape[-1])
    positions = torch.arange(start, start + len(keys), device=table.device)
    ids, lanes = table[positions // block_size], positions % block_size
    write_kv_rows(blocks, layer, ids, lanes, keys, values, scales)


def paged_attention(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    start: int,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of `query [tokens, heads, head_dim]` at positions `start, start + 1, ...`.

    All tokens are of one sequence. Every query head h reads KV head `h // (heads / kv_heads)`; keys and
    values of all positions up to the last query are in `blocks` already, by `table [n]`. With a `window`, a
    token sees that many last tokens, itself included. `scales` are those of a cache in FP8. Scores and sums
    are float32. Scores are multiplied by
    `scale` (None: `head_dim ** -0.5`), then capped, and `sinks` float32 `[heads]` are a logit more beside a
    head's scores (score_rule.py). `ends` int64 `[tokens]` are the first positions that tokens do not see, by
    default those after their own. With `tree`, bool `[tokens, tokens]`, each token sees those of these tokens
    that its row names, its ancestors, which lie at positions `start, ...` as above; it is as far behind
    `start` itself as their number says. Returns `[tokens, heads, head_dim]`.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = blocks.shape[-2]
    block_size = block_tokens(blocks, head_dim)
    end = start + tokens
    first_block = 0 if window is None else max(0, start - window + 1) // block_size
    ids = table[first_block : -(-end // block_size)]
    first = first_block * block_size
    count = end - first
    keys = load_keys(blocks, layer, ids, head_dim, scales)
    keys = keys.permute(1, 2, 0, 3).reshape(kv_heads, head_dim, -1)[..., :count]
    values = load_values(blocks, layer, ids, head_dim, scales)
    values = values.permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :count]

    group = heads // kv_heads
    grouped = query.float().view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = grouped.reshape(kv_heads, group * tokens, head_dim) @ keys
    scores = scores.view(kv_heads, group, tokens, count) * (head_dim**-0.5 if scale is None else scale)
    scores = capped(scores, cap)
    if tokens > 1 or window is not None:
        at = torch.arange(start, end, device=query.device).unsqueeze(1)
        seen = torch.arange(first, end, device=query.device).unsqueeze(0)
        hidden = seen > at if ends is None else seen >= ends.unsqueeze(1)
        if tree is not None:
            hidden[:, start - first :] = ~tree
            at = start + tree.sum(dim=1, keepdim=True) - 1
            seen = torch.cat([seen[:, : start - first], at.T], dim=1)
        if window is not None:
            hidden |= seen <= at - window
        scores.masked_fill_(hidden, -torch.inf)
    per_head = None if sinks is None else sinks.view(kv_heads, group, 1)
    weights = softmax_with_sinks(scores, per_head).view(kv_heads, group * tokens, count)
    mixed = (weights @ values).view(kv_heads, group, tokens, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim).to(query.dtype)
