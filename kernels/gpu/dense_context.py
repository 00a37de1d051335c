"""Gather of several sequences' keys and values from their blocks into contiguous rows.

Prefill attention reads every key once for each tile of queries: at 8,192 tokens 64 times and more. Gathered
once, keys and values come in whole tiles by Hopper's tensor memory accelerator (a quarter to a third faster
on an H200 than from blocks, the gathering included), and are converted once where the cache holds FP8.
Products of FP8 (fp8_prefill.py) take the cache's own numbers, and values with their tokens side by side.

Each sequence has rows from the sum of its predecessors' lengths on, each rounded up to whole tiles; what pads
a tile is zero, for a weight of zero does not silence NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import power_of_two

FEW_SEQUENCES = 64
"""Up to so many one kernel serves all steps: none is compiled for their number while requests wait."""
_TOKENS = 64
"""Tokens that a program brings."""


@dataclass(frozen=True)
class DenseContext:
    """Keys and values of one layer, each `[kv_heads, rows, head_dim]`; values may be across, `[kv_heads,
    head_dim, rows]`.
    """

    keys: torch.Tensor
    values: torch.Tensor


@triton.jit
def context_base(starts, offsets, sequence, TILE: tl.constexpr, SEQUENCES_PAD: tl.constexpr):
    """Return the first row of a sequence's context; `starts` int32 `[S]`, `offsets` int32 `[S + 1]`."""
    number = tl.arange(0, SEQUENCES_PAD)
    before = number < sequence
    first = tl.load(offsets + number, mask=before, other=0)
    length = tl.load(starts + number, mask=before, other=0)
    length += tl.load(offsets + number + 1, mask=before, other=0) - first
    return tl.sum((length + TILE - 1) // TILE * TILE, axis=0)


# One kernel whatever a step's packing happens to be, as in paged_decode.py.
@triton.jit(do_not_specialize=["tables", "starts", "offsets", "origin", "table_stride"])
def _bring(
    blocks, tables, starts, offsets, origin, keys_out, values_out, layer_offset, block_stride, table_stride,
    rows, KV_HEADS: tl.constexpr, KIND_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    SEQUENCES_PAD: tl.constexpr, BASED: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Gather TOKENS tokens of one KV head of one sequence.

    `blocks` is the KV memory from `layer_offset` elements on, `block_stride` elements a block, values
    KIND_STRIDE elements behind keys; `tables` int32 `[S, table_stride]`, `starts` int32 `[S]`, `offsets`
    int32 `[S + 1]`; `origin` int64 `[1]`: with BASED the elements from `blocks` to the KV memory; `keys_out`
    and `values_out` are `[KV_HEADS, rows, D]`, the second with ACROSS `[KV_HEADS, D, rows]`. WINDOW is
    tokens, 0 none; grid `[tiles, KV_HEADS, S]`.
    """
    WIDTH: tl.constexpr = D * BLOCK_SIZE
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    length = start + tl.load(offsets + sequence + 1) - tl.load(offsets + sequence)
    first = tl.program_id(0) * TOKENS
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    filled = (length + TILE - 1) // TILE * TILE
    # A sequence without a chunk reads nothing.
    if (first < filled) & (first + TOKENS > lowest) & (length > start):
        at = tl.multiple_of(first, TOKENS) + tl.arange(0, TOKENS)
        dims = tl.arange(0, D_PAD)
        real = at < length
        in_head = dims < D
        # Whole blocks: a mask of single tokens would cut the loads of keys into single numbers.
        held = at // BLOCK_SIZE * BLOCK_SIZE < length
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + at // BLOCK_SIZE, mask=held, other=0)
        place = blocks + layer_offset + head * WIDTH + block.to(tl.int64) * block_stride
        if BASED:
            place += tl.multiple_of(tl.load(origin), 16)
        lane = at % BLOCK_SIZE
        k_place = place[None, :] + dims[:, None] * BLOCK_SIZE + lane[None, :]
        k = tl.load(k_place, mask=in_head[:, None] & held[None, :], other=0.0)
        k = tl.where(real[None, :], k.to(keys_out.dtype.element_ty), 0.0)
        v_place = place[:, None] + KIND_STRIDE + lane[:, None] * D + dims[None, :]
        v = tl.load(v_place, mask=real[:, None] & in_head[None, :], other=0.0)
        base = context_base(starts, offsets, sequence, TILE, SEQUENCES_PAD)
        row = tl.multiple_of(base, TILE) + at
        out = (head.to(tl.int64) * rows + row)[:, None] * D + dims[None, :]
        mask = (at < filled)[:, None] & in_head[None, :]
        tl.store(keys_out + out, tl.trans(k), mask=mask)
        if ACROSS:
            v_out = (head.to(tl.int64) * D + dims)[None, :] * rows + row[:, None]
        else:
            v_out = out
        tl.store(values_out + v_out, v.to(values_out.dtype.element_ty), mask=mask)


def bring_context(
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    head_dim: int,
    context_tokens: int,
    tile: int,
    window: int | None,
    dtype: torch.dtype,
    base: torch.Tensor | None = None,
    zeroed: bool = False,
    across: bool = False,
) -> DenseContext:
    """Gather what the chunks of S sequences attend to, in `dtype`, not yet multiplied by any scales.

    `blocks` is `[num_blocks, layers, 2, kv_heads, head_dim * block_size]`, which may be a view of some layers
    and heads; `tables` int32 `[S, n]`, `starts` int32 `[S]` and `offsets` int32 `[S + 1]` as in
    paged_prefill; `context_tokens` is at least the sum of the sequences' lengths, chunks included. With a
    `window`, in tokens, what no token of a chunk sees is left out. `base` as in rotary_write. With `zeroed`
    rows of no sequence are zero, not what memory had. Returns keys and values `[kv_heads, rows, head_dim]`,
    with `across` values `[kv_heads, head_dim, rows]`.
    """
    sequences, kv_heads = tables.shape[0], blocks.shape[-2]
    block_size = blocks.shape[-1] // head_dim
    rows = triton.cdiv(context_tokens, tile) * tile + (sequences - 1) * tile
    make = torch.zeros if zeroed else torch.empty
    keys, values = make((2, kv_heads, rows, head_dim), dtype=dtype, device=blocks.device).unbind(0)
    longest = min(tables.shape[1] * block_size, context_tokens)
    _bring[(triton.cdiv(triton.cdiv(longest, tile) * tile, _TOKENS), kv_heads, sequences)](
        blocks, tables, starts, offsets, starts if base is None else base, keys, values,
        layer * blocks.stride(1), blocks.stride(0), tables.stride(0), rows, KV_HEADS=kv_heads,
        KIND_STRIDE=blocks.stride(2), D=head_dim, D_PAD=power_of_two(head_dim, 16), BLOCK_SIZE=block_size,
        TILE=tile, WINDOW=window or 0, TOKENS=_TOKENS, SEQUENCES_PAD=power_of_two(sequences, FEW_SEQUENCES),
        BASED=base is not None, ACROSS=across, num_warps=4,
    )  # fmt: skip
    return DenseContext(keys, values.view(kv_heads, head_dim, rows) if across else values)
