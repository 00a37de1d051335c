"""Decode attention over blocks: rows with one query token each, split over the context.

Flash-decoding (Dao et al. 2023): a row's context is cut into splits, each split's softmax is computed alone
with its maximum and sum, and then they are joined. The meaning is kernels/paged_decode.py.

- **Work.** A fixed number of programs walks a list of items (row, split, KV head) that every program
  derives from the lengths on the device, so one captured graph serves all lengths, and neither a long
  neighbour nor an empty row costs a launch. All query heads that share a KV head are one tile.
- **Join.** The program that finishes a row's last split joins them (decode_splits.py): how many have finished
  is counted in the scratch, where the last one leaves zeros for the next launch.
- **Batch invariance.** Splits are counted in tokens and depend on the row's own length alone; they are added
  in their order, in groups of fixed size. A row's bits are the same alone and among others, whichever program
  was the last.
- **Sinks** (gpt-oss, 2025), a logit for each head beside its scores, enter once: where splits are joined, or
  where a row's only split ends.
- **What lies beyond a length** is not read into the result, whatever it holds: hidden keys are replaced after
  the product, hidden values are not loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.decode_rotary import FreshRows, turned, write_fresh
from kernels.gpu.decode_splits import (
    DecodeScratch,
    first_read,
    fold_in,
    join_sizes,
    join_splits,
    make_scratch,
    max_splits,
    split_size,
    store_joined,
    store_partial,
)
from kernels.gpu.fp8_decode import add_rounded, rounded_rows
from kernels.gpu.launch import (
    INTERPRETED,
    check_dense,
    multiprocessors,
    operand_type,
    power_of_two,
)
from kernels.gpu.scores import score_factors, tanh
from kernels.gpu.tuning import decode_default, look_up, shape_class


# What a step's packing leaves to chance (how many rows, where in an array its numbers begin) helps no load: a
# kernel for every case would be compiled while requests wait.
@triton.jit(
    do_not_specialize=[
        "tables",
        "lengths",
        "rows",
        "table_stride",
        "scratch_splits",
        "scratch_groups",
        "block_ids",
        "lanes",
    ]
)
def _splits(
    query,
    blocks,
    tables,
    lengths,
    scales,
    sinks,
    mixed,
    peaks,
    sums,
    finished,
    out,
    rows,
    layer_offset,
    block_stride,
    table_stride,
    scratch_splits,
    scratch_groups,
    score_scale,
    cap_scale,
    fresh,
    cos,
    sin,
    block_ids,
    lanes,
    q_norm,
    k_norm,
    eps,
    KV_HEADS: tl.constexpr,
    KIND_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    OPERAND: tl.constexpr,
    HALVED: tl.constexpr,
    FRESH: tl.constexpr,
    NORM: tl.constexpr,
    NORM_LATE: tl.constexpr,
    ROTATE: tl.constexpr,
    EIGHT: tl.constexpr,
    BY_HAND: tl.constexpr,
    FOLD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute the softmax of items (row, split, KV head), each program every `num_programs`-th of them.

    `query` and `out` are `[rows, heads, D]`; `blocks` the KV memory from `layer_offset` elements on,
    `block_stride` elements a block, values KIND_STRIDE elements behind keys; `tables` int32 `[rows,
    table_stride]`, `lengths` int32 `[rows]`, `scales` float32 `[2, KV_HEADS]` of the layer, `sinks` float32
    `[heads]`; `mixed` to `finished` as in DecodeScratch, with room for `scratch_splits` splits and
    `scratch_groups` groups. With FOLD the last split of a row joins them, TOGETHER at a time. `score_scale`
    and `cap_scale` are those of `score_factors`, WINDOW is tokens (0 none), GROUP is query heads a KV head.
    EIGHT multiplies in FP8 (fp8_decode.py). FRESH rows have their new tokens in `fresh` to `eps`, as
    FreshRows, and no `query`.
    """
    WIDTH: tl.constexpr = D * BLOCK_SIZE
    numbers = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + numbers, mask=numbers < rows, other=0)
    read = all_lengths - first_read(all_lengths, WINDOW, BLOCK_SIZE)
    size = split_size(read)
    # An empty row (padding of a captured batch) is one item, too, which writes zeros.
    counts = tl.where(numbers < rows, tl.maximum((read + size - 1) // size, 1), 0)
    ends = tl.cumsum(counts, axis=0)
    items = tl.sum(counts, axis=0) * KV_HEADS

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D_PAD)
    tokens = tl.arange(0, TILE)
    in_group = group < GROUP
    in_head = dims < D
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % KV_HEADS
        place = item // KV_HEADS
        row = tl.sum((ends <= place).to(tl.int32), axis=0)
        split = place - tl.sum(tl.where(numbers < row, counts, 0), axis=0)

        length = tl.load(lengths + row)
        first = first_read(length, WINDOW, BLOCK_SIZE)
        size_here = split_size(length - first)
        begin = tl.multiple_of(first + split * size_here, BLOCK_SIZE)
        end = tl.minimum(begin + size_here, length)

        heads = head * GROUP + group
        keys = blocks + layer_offset + head * WIDTH
        values = keys + KIND_STRIDE
        key_scale = 1.0
        value_scale = 1.0
        if SCALED:
            key_scale = tl.load(scales + head)
            value_scale = tl.load(scales + KV_HEADS + head)
        if FRESH:
            token_at = fresh + row.to(tl.int64) * ((GROUP + 2) * KV_HEADS * D)
            angles = row * (D // 2)
            q = turned(
                token_at + heads * D, in_group, q_norm, cos + angles, sin + angles, eps, D, D_PAD, NORM,
                NORM_LATE, ROTATE,
            ).to(query.dtype.element_ty)  # fmt: skip
            if end == length:
                write_fresh(
                    token_at, keys, values, tl.load(block_ids + row), tl.load(lanes + row), block_stride,
                    head, k_norm, cos + angles, sin + angles, eps, key_scale, value_scale, KV_HEADS * GROUP,
                    KV_HEADS, D, D_PAD, BLOCK_SIZE, NORM, NORM_LATE, ROTATE, SCALED, BY_HAND,
                )  # fmt: skip
        else:
            q_place = query + row.to(tl.int64) * (KV_HEADS * GROUP * D) + heads[:, None] * D + dims[None, :]
            q = tl.load(q_place, mask=in_group[:, None] & in_head[None, :], other=0.0)
        key_scale = score_scale * key_scale
        if HALVED:
            # A power of two off the query and back on the scores: bfloat16 goes beyond float16's 65,504.
            q = q.to(tl.float32) * 0.015625
            key_scale *= 64.0
        if EIGHT:
            q, key_scale = rounded_rows(q.to(tl.float32), key_scale, OPERAND, BY_HAND)
        else:
            q = q.to(OPERAND)
        peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
        for position in range(begin, end, TILE):
            at = tl.multiple_of(position, BLOCK_SIZE) + tokens
            lane = at % BLOCK_SIZE
            # Whole blocks: a mask of single tokens would cut the loads of keys into single numbers.
            held = at // BLOCK_SIZE * BLOCK_SIZE < end
            block = tl.load(tables + row * table_stride + at // BLOCK_SIZE, mask=held, other=0)
            start = block.to(tl.int64) * block_stride
            k_place = keys + start[None, :] + dims[:, None] * BLOCK_SIZE + lane[None, :]
            k = tl.load(k_place, mask=in_head[:, None] & held[None, :], other=0.0)
            seen = at < end
            if WINDOW > 0:
                seen = seen & (at >= length - WINDOW)
            v_place = values + start[:, None] + lane[:, None] * D + dims[None, :]
            v = tl.load(v_place, mask=seen[:, None] & in_head[None, :], other=0.0)

            if EIGHT:
                scores = tl.dot(q, k, max_num_imprecise_acc=D_PAD) * key_scale[:, None]
            else:
                scores = tl.dot(q, k.to(OPERAND), input_precision="ieee") * key_scale
            if CAPPED:
                scores = tanh(scores) * cap_scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            # Every tile holds a visible token, so the maximum is a number.
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(peak - higher)
            total = total * faded + tl.sum(weights, axis=1)
            acc = acc * faded[:, None]
            if EIGHT:
                acc = add_rounded(weights, v, acc, TILE, BY_HAND)
            else:
                acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc, input_precision="ieee")
            peak = higher

        acc = acc * value_scale
        row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
        if length - first <= size_here:
            store_joined(acc, peak, total, sinks, heads, out, row_head, SINKS, GROUP, GROUP_PAD, D, D_PAD)
        else:
            partial = row_head * scratch_splits + split
            store_partial(mixed, peaks, sums, partial, acc, peak, total, GROUP, GROUP_PAD, D, D_PAD)
            if FOLD:
                member = tl.arange(0, HEADS_PAD)
                of_row = row.to(tl.int64) * KV_HEADS + head
                own = of_row * GROUP + member
                last, sum_of, peak_of, total_of = fold_in(
                    mixed, peaks, sums, finished + of_row * (scratch_groups + 1), own * scratch_splits, split,
                    (length - first + size_here - 1) // size_here, GROUP, TOGETHER, HEADS_PAD, D, D_PAD,
                )  # fmt: skip
                if last:
                    store_joined(
                        sum_of, peak_of, total_of, sinks, head * GROUP + member, out, own, SINKS, GROUP,
                        HEADS_PAD, D, D_PAD,
                    )  # fmt: skip


def paged_decode(
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
    eight: bool = False,
    apart: bool = False,
    fresh: FreshRows | None = None,
) -> torch.Tensor:
    """Compute attention of `query [rows, heads, head_dim]`, row r over the first `lengths[r]` positions.

    The new token is included; a length of 0 gives zeros. `blocks` is `[num_blocks, layers, 2, kv_heads,
    head_dim * block_size]`, which may be a view of some layers and heads, `tables` int32 `[rows, n]`,
    `lengths` int32 `[rows]`. With a `window`, a row sees that many last tokens. `scale` multiplies scores
    (`head_dim ** -0.5` unless given), which `cap` then bends to `cap * tanh(score / cap)`; `sinks`, float32
    `[heads]`, take their share of each softmax. With `scales`, float32 `[layers, 2, kv_heads]`, keys and
    values are what `blocks` holds times the scale of their head. `scratch` (make_scratch) holds at least
    these rows and `n * block_size` tokens. With `eight` products are of FP8, over a cache in FP8. With
    `fresh` the new tokens' keys and values are not in `blocks` yet and are written; `query` is room for
    queries that is not read. Splits are joined by a launch of their own where that is to be `apart`, or the
    tuner found it better. Returns `[rows, heads, head_dim]`.
    """
    rows, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    most = tables.shape[1] * block_size
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if rows == 0:
        return out
    scratch = scratch or make_scratch(rows, heads, head_dim, most, query.device)
    if scratch.sums.shape[0] < rows or scratch.sums.shape[2] < max_splits(most):
        raise ValueError(f"scratch {tuple(scratch.sums.shape)} is too small for {rows} rows of {most} tokens")
    shapes = shape_class(head_dim, heads // kv_heads, block_size, query.dtype, blocks.dtype)
    default = decode_default(head_dim, blocks.element_size(), block_size)
    tuned = look_up(query.device, "paged_decode", shapes, default)
    # FP8 becomes float16 in half an instruction a number, bfloat16 in several.
    halved = scales is not None and query.dtype == torch.bfloat16 and not INTERPRETED and not eight
    programs = multiprocessors(query.device) * tuned["programs"]
    fold = bool(tuned["fold"]) and not apart
    sizes = join_sizes(heads // kv_heads, head_dim, blocks.element_size())
    scratch_splits = scratch.sums.shape[2]
    _splits[(min(4 if INTERPRETED else programs, rows * kv_heads * max_splits(most)),)](
        query,
        blocks,
        tables,
        lengths,
        query if scales is None else scales[layer],
        query if sinks is None else sinks,
        scratch.mixed,
        scratch.peaks,
        scratch.sums,
        scratch.finished,
        out,
        rows,
        layer * blocks.stride(1),
        blocks.stride(0),
        tables.stride(0),
        scratch_splits,
        scratch.finished.shape[2] - 1,
        *score_factors(head_dim**-0.5 if scale is None else scale, cap),
        *_fresh_tensors(fresh, query),
        KV_HEADS=kv_heads,
        KIND_STRIDE=blocks.stride(2),
        GROUP=heads // kv_heads,
        GROUP_PAD=power_of_two(heads // kv_heads, 16),
        D=head_dim,
        D_PAD=power_of_two(head_dim, 16),
        BLOCK_SIZE=block_size,
        TILE=max(tuned["tile"], block_size),
        WINDOW=window or 0,
        SCALED=scales is not None,
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        ROWS_PAD=power_of_two(rows, 64),
        OPERAND=tl.float8e4nv if eight else operand_type(torch.float16 if halved else query.dtype),
        HALVED=halved,
        FRESH=fresh is not None,
        NORM=fresh is not None and fresh.q_norm is not None,
        NORM_LATE=fresh is not None and fresh.norm_late,
        ROTATE=fresh is not None and fresh.cos is not None,
        EIGHT=eight,
        BY_HAND=INTERPRETED,
        FOLD=fold,
        **sizes,
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
    )
    if not fold:
        join_splits(lengths, scratch, out, kv_heads, block_size, window or 0, sinks, sizes=sizes)
    return out


def _fresh_tensors(fresh: FreshRows | None, query: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of the kernel from `fresh` on; `query` stands for what there is none of."""
    if fresh is None:
        return (*[query] * 7, 0.0)
    optional = (fresh.cos, fresh.sin, fresh.block_ids, fresh.lanes, fresh.q_norm, fresh.k_norm)
    return (check_dense("qkv", fresh.qkv), *(query if one is None else one for one in optional), fresh.eps)
