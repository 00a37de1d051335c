"""Decode attention with the bits of invariant_attention.py: a split of one row a program, then their fold.

As in paged_decode.py, a fixed number of programs walks the items (row, split, KV head) that they derive from
the lengths on the device, so that one captured graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.decode_splits import DecodeScratch
from kernels.gpu.invariant_attention import (
    SPLIT,
    finish_row,
    fold_split,
    shared_constants,
    split_softmax,
    tile_constants,
)
from kernels.gpu.launch import INTERPRETED, check_dense, multiprocessors, power_of_two
from kernels.gpu.scores import score_factors

_PROGRAMS = 4
"""Programs a multiprocessor that walk the splits."""


@triton.jit
def first_split(lengths, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Return the first split that rows with contexts of `lengths [...]` see."""
    first = lengths * 0
    if WINDOW > 0:
        first = tl.maximum(lengths - WINDOW, 0) // SPLIT
    return first


@triton.jit(do_not_specialize=["tables", "lengths", "rows", "table_stride", "scratch_splits"])
def _row_splits(
    query, blocks, tables, lengths, scales, mixed, peaks, sums, rows, layer_offset, block_stride,
    table_stride, scratch_splits, score_scale, cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROWS_PAD: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute splits of decode rows: items (row, split, KV head), each program every `num_programs`-th.

    Arguments as in paged_decode.py; a row's heads are the first GROUP of ROWS rows of a tile.
    """
    numbers = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + numbers, mask=numbers < rows, other=0)
    counts = (all_lengths + SPLIT - 1) // SPLIT - first_split(all_lengths, WINDOW, SPLIT)
    ends = tl.cumsum(counts, axis=0)
    items = tl.sum(counts, axis=0) * KV_HEADS
    group, dims = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    real = group < GROUP
    mask = real[:, None] & (dims < D)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % KV_HEADS
        place = item // KV_HEADS
        row = tl.sum((ends <= place).to(tl.int32), axis=0)
        number = place - tl.sum(tl.where(numbers < row, counts, 0), axis=0)
        length = tl.load(lengths + row)
        row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + group
        q = tl.load(query + row_head[:, None] * D + dims[None, :], mask=mask, other=0.0).to(OPERAND)
        key_scale = score_scale
        if SCALED:
            key_scale = score_scale * tl.load(scales + head)
        keys = blocks + layer_offset + head * (D * BLOCK_SIZE)
        values = keys + KV_HEADS * (D * BLOCK_SIZE)
        first = (first_split(length, WINDOW, SPLIT) + number) * SPLIT
        acc, peak, total = split_softmax(
            q, keys, values, tables + row.to(tl.int64) * table_stride, first, length, length - 1 + group * 0,
            key_scale, cap_scale, block_stride, D, D_PAD, BLOCK_SIZE, ROWS, TILE, SPLIT, WINDOW, CAPPED,
            OPERAND,
        )  # fmt: skip
        partial = row_head * scratch_splits + number
        tl.store(mixed + partial[:, None] * D + dims[None, :], acc, mask=mask)
        tl.store(peaks + partial, peak, mask=real)
        tl.store(sums + partial, total, mask=real)


@triton.jit(do_not_specialize=["lengths", "scratch_splits"])
def _join(
    lengths, scales, sinks, mixed, peaks, sums, out, scratch_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Fold the splits of one KV head's queries of one row, in order; grid `[KV_HEADS, rows]`."""
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    count = (length + SPLIT - 1) // SPLIT - first_split(length, WINDOW, SPLIT)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    real = group < GROUP
    mask = real[:, None] & (dims < D)[None, :]
    row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + group
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for number in range(count):
        partial = row_head * scratch_splits + number
        more = tl.load(mixed + partial[:, None] * D + dims[None, :], mask=mask, other=0.0)
        more_peak = tl.load(peaks + partial, mask=real, other=float("-inf"))
        more_total = tl.load(sums + partial, mask=real, other=0.0)
        acc, peak, total = fold_split(acc, peak, total, more, more_peak, more_total)
    value_scale = 1.0
    if SCALED:
        value_scale = tl.load(scales + KV_HEADS + head)
    result = finish_row(acc, peak, total, sinks, head * GROUP + group, real, value_scale, SINKS)
    # A row without a context (padding of a captured batch) is zero.
    result = tl.where(count > 0, result, 0.0)
    tl.store(out + row_head[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


def make_invariant_scratch(
    rows: int, heads: int, head_dim: int, max_tokens: int, device: torch.device
) -> DecodeScratch:
    """Allocate scratch of `invariant_decode` for up to `rows` rows with contexts of up to `max_tokens`."""
    splits = max(1, triton.cdiv(max_tokens, SPLIT))
    return DecodeScratch(
        torch.empty(rows, heads, splits, head_dim, device=device),
        torch.empty(rows, heads, splits, device=device),
        torch.empty(rows, heads, splits, device=device),
        torch.empty(0, dtype=torch.int32, device=device),  # they are joined by a pass of their own
    )


def invariant_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scratch: DecodeScratch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `paged_decode`, whose arguments these are, with the bits of `invariant_prefill`.

    `scratch` is that of make_invariant_scratch. Returns `[rows, heads, head_dim]`. Raises ValueError for
    scratch that is too small.
    """
    rows, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    most = tables.shape[1] * block_size
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if rows == 0:
        return out
    scratch = scratch or make_invariant_scratch(rows, heads, head_dim, most, query.device)
    splits = scratch.sums.shape[2]
    if len(scratch.sums) < rows or splits * SPLIT < most:
        raise ValueError(f"scratch {tuple(scratch.sums.shape)} is too small for {rows} rows of {most} tokens")
    group = heads // kv_heads
    shared = shared_constants(kv_heads, group, head_dim, window, scales)
    factors = score_factors(head_dim**-0.5 if scale is None else scale, cap)
    of_layer = query if scales is None else scales[layer]
    programs = 4 if INTERPRETED else _PROGRAMS * multiprocessors(query.device)
    _row_splits[(min(programs, rows * kv_heads * splits),)](
        query, blocks, tables, lengths, of_layer, scratch.mixed, scratch.peaks, scratch.sums, rows,
        layer * 2 * kv_heads * blocks.shape[-1], blocks.stride(0), tables.stride(0), splits, *factors,
        ROWS_PAD=power_of_two(rows, 64), CAPPED=cap is not None,
        **tile_constants(query, group, block_size), **shared,
    )  # fmt: skip
    _join[(kv_heads, rows)](
        lengths, of_layer, query if sinks is None else sinks, scratch.mixed, scratch.peaks, scratch.sums, out,
        splits, GROUP_PAD=power_of_two(group), SINKS=sinks is not None, num_warps=4, **shared,
    )  # fmt: skip
    return out
