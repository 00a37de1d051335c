"""Prefill attention over blocks: chunks of several prompts, packed, each causal over its cached prefix and
itself.

Flash attention 2 (Dao 2023) with keys and values gathered from blocks. Means kernels/paged_attention.py, a
sequence at a time.

- All query heads that share a KV head are in one tile: its rows are (token, head) pairs in memory's order, so
  any number of heads fits, and a chunk of few tokens still fills a tile.
- Tiles of keys lie at fixed positions of the sequence, from its beginning, and tiles in which a row sees
  nothing change none of its bits: a result depends neither on neighbours nor on how a prompt is cut.
- Only tiles that the diagonal (or the window) crosses are masked. The longest rows start first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import LOG2_E, check_dense, operand_type, power_of_two
from kernels.gpu.tuning import look_up, prefill_default, shape_class


@triton.jit
def _advance(
    acc,
    peak,
    total,
    q,
    position,
    lowest,
    end,
    seen_by,
    keys,
    values,
    table,
    block_stride,
    key_scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One tile of keys and values, folded into the running softmax of every row.

    `seen_by [rows]` is the last position that each row sees, `end` one above the largest of them; before
    `lowest` no row sees anything.
    """
    dims = tl.arange(0, D_PAD)
    in_head = dims < D
    at = tl.multiple_of(position, TILE) + tl.arange(0, TILE)
    lane = at % BLOCK_SIZE
    if MASKED:
        held = at // BLOCK_SIZE * BLOCK_SIZE < end
        block = tl.load(table + at // BLOCK_SIZE, mask=held, other=0)
    else:
        block = tl.load(table + at // BLOCK_SIZE)
    start = block.to(tl.int64) * block_stride
    k_place = keys + start[None, :] + dims[:, None] * BLOCK_SIZE + lane[None, :]
    v_place = values + start[:, None] + lane[:, None] * D + dims[None, :]
    if MASKED:
        k = tl.load(k_place, mask=in_head[:, None] & held[None, :], other=0.0)
        # Weight zero is not enough where a lane holds NaN: such values are not loaded.
        v = tl.load(v_place, mask=((at >= lowest) & (at < end))[:, None] & in_head[None, :], other=0.0)
    elif D_PAD != D:
        k = tl.load(k_place, mask=in_head[:, None], other=0.0)
        v = tl.load(v_place, mask=in_head[None, :], other=0.0)
    else:
        k = tl.load(k_place)
        v = tl.load(v_place)
    scores = tl.dot(q, k.to(OPERAND), input_precision="ieee")
    if MASKED:
        seen = at[None, :] <= seen_by[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > seen_by[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * key_scale)
    if WINDOW > 0:
        # A row may have seen nothing yet: no number is subtracted from -inf then.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        anchor = higher
    weights = tl.exp2(scores * key_scale - anchor[:, None])
    faded = tl.exp2(peak - anchor)
    total = total * faded + tl.sum(weights, axis=1)
    acc = acc * faded[:, None]
    acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc, input_precision="ieee")
    return acc, higher, total


# One kernel whatever a step's packing happens to be, as in paged_decode.py.
@triton.jit(do_not_specialize=["tables", "starts", "offsets", "table_stride"])
def _paged_prefill(
    query,
    blocks,
    tables,
    starts,
    offsets,
    scales,
    out,
    layer_offset,
    block_stride,
    table_stride,
    score_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    WIDTH: tl.constexpr = D * BLOCK_SIZE
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(offsets + sequence)
    tokens = tl.load(offsets + sequence + 1) - first_row
    if tile * ROWS < tokens * GROUP:
        start = tl.load(starts + sequence)
        pair = tile * ROWS + tl.arange(0, ROWS)
        token = pair // GROUP
        real = token < tokens
        dims = tl.arange(0, D_PAD)
        row_head = (first_row + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + pair % GROUP
        place = row_head[:, None] * D + dims[None, :]
        mask = real[:, None] & (dims < D)[None, :]
        q = tl.load(query + place, mask=mask, other=0.0).to(OPERAND)

        key_scale = score_scale
        value_scale = 1.0
        if SCALED:
            key_scale = score_scale * tl.load(scales + head)
            value_scale = tl.load(scales + KV_HEADS + head)
        seen_by = start + token
        nearest = start + tile * ROWS // GROUP
        end = start + tl.minimum((tile * ROWS + ROWS - 1) // GROUP + 1, tokens)
        lowest = 0
        begin = 0
        # Tiles before this are seen whole by every row.
        diagonal = (nearest + 1) // TILE * TILE
        if WINDOW > 0:
            lowest = tl.maximum(nearest - WINDOW + 1, 0)
            begin = lowest // TILE * TILE
            diagonal = begin

        keys = blocks + layer_offset + head * WIDTH
        values = keys + KV_HEADS * WIDTH
        table = tables + sequence.to(tl.int64) * table_stride
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for position in range(begin, diagonal, TILE):
            acc, peak, total = _advance(
                acc, peak, total, q, position, lowest, end, seen_by, keys, values, table, block_stride,
                key_scale, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, False, OPERAND,
            )  # fmt: skip
        for position in range(diagonal, end, TILE):
            acc, peak, total = _advance(
                acc, peak, total, q, position, lowest, end, seen_by, keys, values, table, block_stride,
                key_scale, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, True, OPERAND,
            )  # fmt: skip
        # Rows that pad the tile may have seen nothing.
        result = acc * (value_scale / tl.where(real, total, 1.0))[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def paged_prefill(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_tokens: int,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the chunks of S sequences, whose tokens lie one after the other in `query [T,
    heads, head_dim]`: those of sequence s are rows `offsets[s]` to `offsets[s + 1]`, at positions `starts[s],
    starts[s] + 1, ...`.

    `tables` int32 `[S, n]`, `starts` int32 `[S]`, `offsets` int32 `[S + 1]`; `max_tokens` is the longest
    chunk. Keys and values of all positions up to each chunk's last are in `blocks` already. `window` and
    `scales` as in paged_decode. Returns `[T, heads, head_dim]`; rows of no sequence are left as they are.
    """
    _, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    group, sequences = heads // kv_heads, tables.shape[0]
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if max_tokens == 0 or sequences == 0:
        return out
    shapes = shape_class(head_dim, group, block_size, query.dtype, blocks.dtype)
    smallest = query.element_size() if query.element_size() == 4 else blocks.element_size()
    default = prefill_default(head_dim, smallest)
    tuned = look_up(query.device, "paged_prefill", shapes, default)
    _paged_prefill[(triton.cdiv(max_tokens * group, tuned["rows"]), kv_heads, sequences)](
        query,
        blocks,
        tables,
        starts,
        offsets,
        query if scales is None else scales[layer],
        out,
        layer * 2 * kv_heads * blocks.shape[-1],
        blocks.stride(0),
        tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        D_PAD=power_of_two(head_dim, 16),
        BLOCK_SIZE=block_size,
        ROWS=tuned["rows"],
        TILE=max(tuned["tile"], block_size),
        WINDOW=window or 0,
        SCALED=scales is not None,
        OPERAND=operand_type(query.dtype),
        num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
    )
    return out
