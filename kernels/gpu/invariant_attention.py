"""Attention over blocks in which a token has the same bits alone, in a chunk of any length and in a step of
any size.

The splits of paged_decode.py and the tiles of paged_prefill.py are each batch-invariant, but not the same:
a token that a decode step computes is summed in another order than in a chunk. Here both are one order:

- Keys are cut into splits of SPLIT positions **from the sequence's beginning on**, never by its length. The
  softmax of a split runs over tiles of keys in order; splits are folded into one another in order.
- A chunk's program computes a tile of rows over all splits and folds them as it goes. Of a row alone that
  would leave the device idle: there (invariant_decode.py) each split is a program, and a second launch folds.
  Both call the same functions over tiles of the same shape, and multiplications and additions are not fused,
  which a compiler may do in one place and not in another.
- What a row does not see changes nothing: a tile in which all its scores are -inf multiplies its sums by 1
  and adds 0, and so does a split.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type, power_of_two
from kernels.gpu.scores import LOG2_E_F32, score_factors, tanh

SPLIT = 256
"""Positions of a split. By arithmetic: a row's partial sums in float32 are 2% of the bytes read for them."""
_TILE = 64
_ROWS, _FLOAT32_ROWS = 64, 16
"""Pairs of a token and a head that a program computes; of a row alone most are padding."""


@triton.jit
def split_softmax(
    q, keys, values, table, first, end, seen_by, key_scale, cap_scale,
    block_stride, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Return sums `[ROWS, D_PAD]`, peaks and totals `[ROWS]` of the softmax over positions from `first` on.

    `q [ROWS, D_PAD]`; `keys` and `values` those of one head in the KV memory, `block_stride` elements a
    block; `table [n]`; positions at and beyond `end` are not read; `seen_by [ROWS]` is each row's position.
    """
    dims = tl.arange(0, D_PAD)
    in_head = dims < D
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for position in range(first, tl.minimum(first + SPLIT, end), TILE):
        at = position + tl.arange(0, TILE)
        lane = at % BLOCK_SIZE
        # Whole blocks: a mask of single tokens would cut the loads of keys into single numbers.
        held = at // BLOCK_SIZE * BLOCK_SIZE < end
        block = tl.load(table + at // BLOCK_SIZE, mask=held, other=0).to(tl.int64) * block_stride
        k_place = keys + block[None, :] + dims[:, None] * BLOCK_SIZE + lane[None, :]
        k = tl.load(k_place, mask=in_head[:, None] & held[None, :], other=0.0)
        v_place = values + block[:, None] + lane[:, None] * D + dims[None, :]
        v = tl.load(v_place, mask=(at < end)[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k.to(OPERAND), input_precision="ieee") * key_scale
        if CAPPED:
            scores = tanh(scores) * cap_scale
        seen = at[None, :] <= seen_by[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > seen_by[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A row may have seen nothing yet: no number is subtracted from -inf then.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        faded = tl.exp2(peak - anchor)
        total = total * faded + tl.sum(weights, axis=1)
        acc = acc * faded[:, None]
        acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc, input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def fold_split(acc, peak, total, more, more_peak, more_total):
    """Return sums `[rows, dims]`, peaks and totals `[rows]` with those of one split more."""
    higher = tl.maximum(peak, more_peak)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    before, faded = tl.exp2(peak - anchor), tl.exp2(more_peak - anchor)
    acc = acc * before[:, None] + more * faded[:, None]
    return acc, higher, total * before + more_total * faded


@triton.jit
def finish_row(acc, peak, total, sinks, heads, real, value_scale, SINKS: tl.constexpr):
    """Return the result `[rows, dims]` of sums over all splits; `heads` and `real [rows]`."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2_E_F32
        acc, peak, total = fold_split(acc, peak, total, tl.zeros_like(acc), sink, tl.zeros_like(total) + 1.0)
    # Rows of padding have seen nothing; a zero has one sign, however many zeros were added.
    return acc * value_scale / tl.where(total > 0.0, total, 1.0)[:, None] + 0.0


@triton.jit(do_not_specialize=["tables", "starts", "offsets", "origin", "table_stride"])
def _chunks(
    query, blocks, tables, starts, offsets, origin, scales, sinks, out, layer_offset, block_stride,
    table_stride, score_scale, cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BASED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute ROWS (token, head) pairs of one KV head of one sequence; arguments as in paged_prefill.py.

    Grid `[tiles, KV_HEADS, S]`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(offsets + sequence)
    tokens = tl.load(offsets + sequence + 1) - first_row
    if tile * ROWS < tokens * GROUP:
        start = tl.load(starts + sequence)
        pair = tile * ROWS + tl.arange(0, ROWS)
        token = pair // GROUP
        real = token < tokens
        dims = tl.arange(0, D_PAD)
        heads = head * GROUP + pair % GROUP
        place = ((first_row + token).to(tl.int64) * (KV_HEADS * GROUP) + heads)[:, None] * D + dims[None, :]
        mask = real[:, None] & (dims < D)[None, :]
        q = tl.load(query + place, mask=mask, other=0.0).to(OPERAND)
        key_scale = score_scale
        value_scale = 1.0
        if SCALED:
            key_scale = score_scale * tl.load(scales + head)
            value_scale = tl.load(scales + KV_HEADS + head)
        keys = blocks + layer_offset + head * (D * BLOCK_SIZE)
        if BASED:
            keys += tl.multiple_of(tl.load(origin), 16)
        values = keys + KV_HEADS * (D * BLOCK_SIZE)
        table = tables + sequence.to(tl.int64) * table_stride
        end = start + tl.minimum((tile * ROWS + ROWS - 1) // GROUP + 1, tokens)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(start + tile * ROWS // GROUP - WINDOW + 1, 0) // SPLIT * SPLIT
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for first in range(begin, end, SPLIT):
            more, more_peak, more_total = split_softmax(
                q, keys, values, table, first, end, start + token, key_scale, cap_scale, block_stride,
                D, D_PAD, BLOCK_SIZE, ROWS, TILE, SPLIT, WINDOW, CAPPED, OPERAND,
            )  # fmt: skip
            acc, peak, total = fold_split(acc, peak, total, more, more_peak, more_total)
        result = finish_row(acc, peak, total, sinks, heads, real, value_scale, SINKS)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def invariant_prefill(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_tokens: int,
    context_tokens: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `paged_prefill`, whose arguments these are, in an order that does not depend on the chunks.

    Returns `[T, heads, head_dim]`; rows of no sequence are left as they are. Raises ValueError for a tree:
    its tokens do not lie where they would without their siblings.
    """
    if tree is not None:
        raise ValueError("a tree of tokens has other bits than its branches alone")
    _, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    group, sequences = heads // kv_heads, tables.shape[0]
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if max_tokens == 0 or sequences == 0:
        return out
    tiles = tile_constants(query, group, block_size)
    _chunks[(triton.cdiv(max_tokens * group, tiles["ROWS"]), kv_heads, sequences)](
        query, blocks, tables, starts, offsets, starts if base is None else base,
        query if scales is None else scales[layer], query if sinks is None else sinks, out,
        layer * 2 * kv_heads * blocks.shape[-1], blocks.stride(0), tables.stride(0),
        *score_factors(head_dim**-0.5 if scale is None else scale, cap),
        CAPPED=cap is not None, SINKS=sinks is not None, BASED=base is not None, **tiles,
        **shared_constants(kv_heads, group, head_dim, window, scales),
    )  # fmt: skip
    return out


def shared_constants(
    kv_heads: int, group: int, head_dim: int, window: int | None, scales: torch.Tensor | None
) -> dict[str, Any]:
    """Return constants of all three kernels; `scales` float32 `[layers, 2, kv_heads]`."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": head_dim,
        "D_PAD": power_of_two(head_dim, 16),
        "SPLIT": SPLIT,
        "WINDOW": window or 0,
        "SCALED": scales is not None,
        "enable_fp_fusion": False,
    }


def tile_constants(query: torch.Tensor, group: int, block_size: int) -> dict[str, Any]:
    """Return constants of the two kernels that read keys, for `query [T, heads, head_dim]`.

    They are the same for both, or bits would differ.
    """
    rows = _FLOAT32_ROWS if query.dtype == torch.float32 else _ROWS
    return {
        "BLOCK_SIZE": block_size,
        "ROWS": power_of_two(group, rows),
        "TILE": max(_TILE, block_size),
        "OPERAND": operand_type(query.dtype),
        "num_warps": 8 if query.shape[2] > 128 else 4,
        "num_stages": 2,
    }
