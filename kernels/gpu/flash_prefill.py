"""Prefill attention by FlashAttention-3, where its package is installed (`flash_attn_interface`; Shah et al.,
2024), in place of paged_prefill.py.

On an H200 it was faster at every length that was measured, by 1.2 to 1.4 (docs/performance.md). Keys and
values are gathered as for our own kernel and then packed for it. Our own kernel computes what it does not:
sinks, FP8 caches, trees, recorded steps, and numbers of 32 bits.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kernels.gpu.dense_context import bring_context
from kernels.gpu.launch import check_dense
from kernels.gpu.paged_prefill import paged_prefill

PACKAGE = "flash_attn_interface"
_TILE = 128
"""Rows of whole tiles in which contexts are packed."""
_MOST_HEAD_DIM = 256


def lacks_flash() -> str | None:
    """Return why FlashAttention-3 cannot be used; None if its package is there."""
    try:
        importlib.import_module(PACKAGE).flash_attn_varlen_func  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"no FlashAttention-3 here: {error}"
    return None


def takes(query: torch.Tensor, **rule: Any) -> bool:
    """Return whether FlashAttention-3 computes attention of `query [T, heads, head_dim]` by this rule."""
    own = ("sinks", "scales", "tree", "base")
    return (
        query.dtype.itemsize == 2
        and query.shape[-1] <= _MOST_HEAD_DIM
        and query.shape[-1] % 8 == 0
        and rule.get("context_tokens") is not None
        and all(rule.get(name) is None for name in own)
    )


def flash_prefill(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_tokens: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    out: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """Compute what `paged_prefill` does of `query [T, heads, head_dim]`, by FlashAttention-3 if it `takes`
    the rule; see there for the other arguments and the result.

    `context_tokens` is the exact sum of the sequences' lengths, chunks included. Nothing waits for the
    device.
    """
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if max_tokens == 0 or len(tables) == 0 or not takes(query, **more):
        return paged_prefill(
            query, blocks, layer, tables, starts, offsets, max_tokens=max_tokens, window=window,
            scale=scale, cap=cap, out=out, **more,
        )  # fmt: skip
    context_tokens = more["context_tokens"]
    # All of the context, and zeros where there is none: it is read in tiles, with weights of zero that do not
    # silence NaN.
    found = bring_context(
        blocks, layer, tables, starts, offsets, head_dim=query.shape[-1], context_tokens=context_tokens,
        tile=_TILE, window=None, dtype=query.dtype, zeroed=True,
    )  # fmt: skip
    lengths = starts + offsets.diff()
    chunked = torch.where(offsets.diff() > 0, lengths, 0)
    firsts = torch.nn.functional.pad(((lengths + _TILE - 1) // _TILE * _TILE).cumsum(0), (1, 0)).int()
    result = importlib.import_module(PACKAGE).flash_attn_varlen_func(
        query,
        found.keys.transpose(0, 1),
        found.values.transpose(0, 1),
        cu_seqlens_q=offsets,
        cu_seqlens_k=firsts,
        max_seqlen_q=max_tokens,
        max_seqlen_k=context_tokens,
        seqused_k=chunked.int(),
        softmax_scale=query.shape[-1] ** -0.5 if scale is None else scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=0.0 if cap is None else cap,
    )
    mixed = result[0] if isinstance(result, tuple) else result
    rows = torch.arange(len(query), device=query.device) < offsets[-1]  # others are left as they are
    return out.copy_(torch.where(rows[:, None, None], mixed, out))
