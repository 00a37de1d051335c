"""Meaning of attention whose products are of FP8 (E4M3), over a cache in FP8 (fp8_cache.py).

- A row of queries, one token of one head, is rounded with a scale of its own: its largest number is E4M3's.
- Keys and values are multiplied as they lie in the cache; their scales multiply sums.
- A weight is rounded 256 times as large: the highest is 256, of E4M3's 448, and those below 2 ** -18 of it
  are lost. Contexts are walked in tiles, and a weight is measured by the highest score up to its tile's end:
  its rounding depends on the tile.
- Sums are float32, and so are the weights that they are divided by, which are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable

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
    keys, values = _dense(blocks, layer, ids, head_dim)
    of = torch.arange(heads, device=query.device) // (heads // kv_heads)
    key_scales, value_scales = scales[layer, :, of]
    factor = query_scales * key_scales * (head_dim**-0.5 if scale is None else scale)
    at = torch.arange(start, end, device=query.device)[:, None, None]

    mixed, total, peak = _walk(rounded, keys[of], values[of], factor, at, (0, end), tile, window, cap)
    result: torch.Tensor = _finished(mixed, total, peak, sinks) * value_scales[:, None]
    return result.to(query.dtype)


def fp8_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None,
    scales: torch.Tensor,
    *,
    tile: int,
    split: Callable[[int], int],
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute decode attention of `query [rows, heads, head_dim]` over `blocks` in FP8, in tiles of `tile`.

    The other arguments and the result are those of `paged_decode`. Contexts are cut into splits of
    `split(tokens read)` tokens from the block on where reading begins; each is walked alone and has a highest
    score of its own.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, size = blocks.shape[-2], block_tokens(blocks, head_dim)
    rounded, query_scales = round_queries(query)
    of = torch.arange(heads, device=query.device) // (heads // kv_heads)
    key_scales, value_scales = scales[layer, :, of]
    factor = query_scales * key_scales * (head_dim**-0.5 if scale is None else scale)
    found = torch.zeros(query.shape, device=query.device)
    for row, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        if length == 0:
            continue
        keys, values = _dense(blocks, layer, table[: -(-length // size)], head_dim)
        at = torch.full((1, 1, 1), length - 1, device=query.device)
        first = 0 if window is None else max(length - window, 0) // size * size
        step, one = split(length - first), slice(row, row + 1)
        peak = torch.full((1, heads, 1), -torch.inf, device=query.device)
        total, mixed = torch.zeros_like(peak), torch.zeros((1, *query.shape[1:]), device=query.device)
        for begin in range(first, length, step):
            part, part_total, part_peak = _walk(
                rounded[one], keys[of], values[of], factor[one], at, (begin, min(begin + step, length)), tile,
                window, cap,
            )  # fmt: skip
            higher = torch.maximum(peak, part_peak)
            before, faded = (peak - higher).exp(), (part_peak - higher).exp()
            mixed, total = mixed * before + part * faded, total * before + part_total * faded
            peak = higher
        found[one] = _finished(mixed, total, peak, sinks)
    result: torch.Tensor = found * value_scales[:, None]
    return result.to(query.dtype)


def _dense(
    blocks: torch.Tensor, layer: int, ids: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of blocks `ids` as they are kept: float32 `[kv_heads, tokens, head_dim]`."""
    kv_heads = blocks.shape[-2]
    keys = load_keys(blocks, layer, ids, head_dim).float().permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)
    values = load_values(blocks, layer, ids, head_dim).float().permute(1, 0, 2, 3).reshape(keys.shape)
    return keys, values


def _walk(
    rounded: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    factor: torch.Tensor,
    at: torch.Tensor,
    span: tuple[int, int],
    tile: int,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sums of values `[tokens, heads, head_dim]`, of weights, and the highest score `[tokens, heads,
    1]` over the positions of `span`, whose keys and values are `[heads, positions, head_dim]`.

    `rounded [tokens, heads, head_dim]` are queries at positions `at [tokens, 1, 1]`, `factor [tokens, heads]`
    that of their scores. Both sums are WEIGHT_SCALE times as large.
    """
    tokens, heads, _ = rounded.shape
    peak = torch.full((tokens, heads, 1), -torch.inf, device=rounded.device)
    total, mixed = torch.zeros_like(peak), torch.zeros(rounded.shape, device=rounded.device)
    for begin in range(*span, tile):
        stop = min(begin + tile, span[1])
        scores = torch.einsum("thd,hkd->thk", rounded.float(), keys[:, begin:stop]) * factor.unsqueeze(-1)
        seen = torch.arange(begin, stop, device=rounded.device)
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        scores = capped(scores, cap).masked_fill(hidden, -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, faded = (scores - anchor).exp() * WEIGHT_SCALE, (peak - anchor).exp()
        total = total * faded + weights.sum(-1, keepdim=True)
        part = torch.einsum("thk,hkd->thd", weights.to(DTYPE).float(), values[:, begin:stop])
        mixed, peak = mixed * faded + part, higher
    return mixed, total, peak


def _finished(
    mixed: torch.Tensor, total: torch.Tensor, peak: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the sums of `_walk` divided, beside `sinks [heads]` if there are any."""
    if sinks is not None:
        sink = sinks.float()[None, :, None]
        higher = torch.maximum(peak, sink)
        faded = (peak - higher).exp()
        mixed, total = mixed * faded, total * faded + (sink - higher).exp() * WEIGHT_SCALE
    result: torch.Tensor = mixed / total
    return result
