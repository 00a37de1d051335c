"""Prefill attention over blocks: packed chunks of several prompts, each causal over its cached prefix and
itself.

Flash attention 2 (Dao 2023) over keys and values that were gathered from their blocks (dense_context.py), or
of short chunks over the blocks themselves (table_prefill.py). The meaning is kernels/paged_attention.py, a
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
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.dense_context import FEW_SEQUENCES, bring_context, context_base
from kernels.gpu.launch import check_dense, operand_type, power_of_two
from kernels.gpu.scores import LOG2_E_F32, score_factors, tanh
from kernels.gpu.table_prefill import MOST_TILES, table_tile
from kernels.gpu.tuning import look_up, prefill_default, program_memory, shape_class


@triton.jit
def _advance(
    acc, peak, total, q, position, k, v, seen_by, start, ancestors, key_scale, cap_scale,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    TREE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys across, `k [dims, TILE]`, and values `v [TILE, dims]`, the tokens from `position`
    on, into the running softmax of every row.

    `acc [rows, dims]`, `peak [rows]` and `total [rows]` are the running sums; `q [rows, dims]`; `seen_by
    [rows]` is the last position that each row sees, of a TREE its own one, and `ancestors` int64 `[rows]`
    has a bit for each token from `start` on that it sees.
    """
    scores = tl.dot(q, k.to(OPERAND), input_precision="ieee")
    factor = key_scale
    if CAPPED:
        scores = tanh(scores * key_scale)
        factor = cap_scale
    if MASKED:
        at = position + tl.arange(0, TILE)
        seen = at[None, :] <= seen_by[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > seen_by[:, None] - WINDOW)
        if TREE:
            back = at - start
            bit = (ancestors[:, None] >> tl.minimum(tl.maximum(back, 0), 63).to(tl.int64)[None, :]) & 1
            seen = tl.where((back < 0)[None, :], seen, (bit != 0) & (back < 64)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    if WINDOW > 0 or TREE:
        # A row may have seen nothing yet: no number is subtracted from -inf then.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        anchor = higher
    weights = tl.exp2(scores * factor - anchor[:, None])
    faded = tl.exp2(peak - anchor)
    total = total * faded + tl.sum(weights, axis=1)
    acc = acc * faded[:, None]
    acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc, input_precision="ieee")
    return acc, higher, total


# One kernel whatever a step's packing happens to be, as in paged_decode.py.
@triton.jit(do_not_specialize=["starts", "offsets", "trees", "tables", "origin", "table_stride"])
def _paged_prefill(
    query, keys, values, starts, offsets, trees, scales, sinks, out, rows, score_scale, cap_scale,
    tables, origin, layer_offset, block_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, TREE: tl.constexpr, OPERAND: tl.constexpr, SEQUENCES_PAD: tl.constexpr,
    BY_TABLE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND_STRIDE: tl.constexpr, BASED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS (token, head) pairs of one KV head of one sequence.

    `query` and `out` are `[T, heads, D]`; `keys` and `values` dense, `[KV_HEADS, rows, D]`. BY_TABLE `keys`
    is the KV memory from `layer_offset` elements on instead, `block_stride` elements a block, values
    KIND_STRIDE elements behind keys, whose blocks are in `tables` int32 `[S, table_stride]`; `origin` int64
    `[1]`: with BASED the elements to it. `starts` int32 `[S]`, `offsets` int32 `[S + 1]`, `trees` int64 `[T,
    2]` of a TREE, `scales` float32 `[2, KV_HEADS]` of the layer, `sinks` float32 `[heads]`. `score_scale` and
    `cap_scale` are those of `score_factors`, WINDOW is tokens (0 none), GROUP is query heads a KV head; grid
    `[tiles, KV_HEADS, S]`.
    """
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
        ancestors = token.to(tl.int64)
        if TREE:
            ancestors = tl.load(trees + (first_row + token) * 2, mask=real, other=0)
            seen_by = start + tl.load(trees + (first_row + token) * 2 + 1, mask=real, other=0).to(tl.int32)
            nearest = start
        end = start + tl.minimum((tile * ROWS + ROWS - 1) // GROUP + 1, tokens)
        begin = 0
        # Tiles before this are seen whole by every row.
        diagonal = (nearest + 1) // TILE * TILE
        if TREE:
            diagonal = start // TILE * TILE
        if WINDOW > 0:
            begin = tl.maximum(nearest - WINDOW + 1, 0) // TILE * TILE
            diagonal = begin

        length = start + tokens
        base = 0
        if BY_TABLE:
            table = tables + sequence.to(tl.int64) * table_stride
            k_base = keys + layer_offset + head * (D * BLOCK_SIZE)
            if BASED:
                k_base += tl.multiple_of(tl.load(origin), 16)
            v_base = k_base + KIND_STRIDE
        else:
            base = head * rows + context_base(starts, offsets, sequence, TILE, SEQUENCES_PAD)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for position in range(begin, diagonal, TILE):
            if BY_TABLE:
                k, v = table_tile(
                    k_base, v_base, table, position, length, block_stride, D, D_PAD, BLOCK_SIZE, TILE, False
                )
            else:
                k, v = keys.load([base + position, 0]).T, values.load([base + position, 0])
            acc, peak, total = _advance(
                acc, peak, total, q, position, k, v, seen_by, start, ancestors, key_scale, cap_scale,
                TILE, WINDOW, CAPPED, False, TREE, OPERAND,
            )  # fmt: skip
        for position in range(diagonal, end, TILE):
            if BY_TABLE:
                k, v = table_tile(
                    k_base, v_base, table, position, length, block_stride, D, D_PAD, BLOCK_SIZE, TILE, True
                )
            else:
                k, v = keys.load([base + position, 0]).T, values.load([base + position, 0])
            acc, peak, total = _advance(
                acc, peak, total, q, position, k, v, seen_by, start, ancestors, key_scale, cap_scale,
                TILE, WINDOW, CAPPED, True, TREE, OPERAND,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + head * GROUP + pair % GROUP) * LOG2_E_F32
            higher = tl.maximum(peak, sink)
            faded = tl.exp2(peak - higher)
            total = total * faded + tl.exp2(sink - higher)
            acc = acc * faded[:, None]
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
    """Compute causal attention of the chunks of S sequences, packed in `query [T, heads, head_dim]`.

    The tokens of sequence s are rows `offsets[s]` to `offsets[s + 1]`, at positions `starts[s], starts[s] +
    1, ...`. `blocks` is `[num_blocks, layers, 2, kv_heads, head_dim * block_size]`, `tables` int32 `[S, n]`,
    `starts` int32 `[S]`, `offsets` int32 `[S + 1]`; `max_tokens` is the longest chunk, `context_tokens` the
    sum of all sequences' lengths with their chunks (what the tables have room for unless given). Keys and
    values of all positions up to each chunk's last are in `blocks` already. `window`, `scale`, `cap`, `sinks`
    and `scales` as in paged_decode. With `tree` int64 `[T, 2]` chunks of up to 64 tokens are trees: a row
    sees those of its chunk's tokens whose bits are set in its first number, itself included, and is at
    position `starts[s]` and its second one; a window of fewer than 64 tokens is not applied within the tree.
    `base` as in rotary_write.
    Returns `[T, heads, head_dim]`; rows of no sequence are left as they are.
    """
    _, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    group, sequences = heads // kv_heads, tables.shape[0]
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    if max_tokens == 0 or sequences == 0:
        return out
    shapes = shape_class(head_dim, group, block_size, query.dtype, blocks.dtype)
    default = prefill_default(head_dim, query.element_size(), program_memory(query.device))
    tuned = look_up(query.device, "paged_prefill", shapes, (*default, ("by_table", MOST_TILES)))
    tile, padded = tuned["tile"], power_of_two(head_dim, 16)
    tiles = triton.cdiv(max_tokens * group, tuned["rows"])
    by_table = tiles <= tuned.get("by_table", MOST_TILES)
    keys = values = blocks
    rows = 0
    if not by_table:
        context = bring_context(
            blocks, layer, tables, starts, offsets, head_dim=head_dim, tile=tile, window=window,
            dtype=query.dtype, base=base,
            context_tokens=tables.numel() * block_size if context_tokens is None else context_tokens,
        )  # fmt: skip
        rows = context.keys.shape[1]
        keys, values = (
            TensorDescriptor(part, [kv_heads * rows, head_dim], [head_dim, 1], [tile, padded])
            for part in (context.keys, context.values)
        )
    _paged_prefill[(tiles, kv_heads, sequences)](
        query, keys, values, starts, offsets, offsets if tree is None else check_dense("tree", tree),
        query if scales is None else scales[layer],
        query if sinks is None else sinks, out, rows,
        *score_factors(head_dim**-0.5 if scale is None else scale, cap),
        tables, starts if base is None else base, layer * blocks.stride(1), blocks.stride(0),
        tables.stride(0), KV_HEADS=kv_heads, GROUP=group, D=head_dim, D_PAD=padded, ROWS=tuned["rows"],
        TILE=tile, WINDOW=window or 0, SCALED=scales is not None, CAPPED=cap is not None,
        SINKS=sinks is not None, TREE=tree is not None, OPERAND=operand_type(query.dtype),
        SEQUENCES_PAD=power_of_two(sequences, FEW_SEQUENCES), BY_TABLE=by_table, BLOCK_SIZE=block_size,
        KIND_STRIDE=blocks.stride(2), BASED=base is not None, num_stages=tuned["num_stages"],
        # Addresses of a tile take registers as well, which four warps have not beside 128 rows.
        num_warps=max(tuned["num_warps"], tuned["rows"] // 16) if by_table else tuned["num_warps"],
    )  # fmt: skip
    return out
