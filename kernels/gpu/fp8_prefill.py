"""Prefill attention whose products are of FP8, over a cache in FP8; the meaning is kernels/fp8_attention.py.

The walk is that of paged_prefill.py. A row of queries is rounded once, as it is read; keys and values are
gathered as they lie in the cache, values with their tokens side by side: matrix instructions of FP8 want the
depth of both operands contiguous. Hopper adds up products of FP8 in fewer bits than float32 has, so that a
tile's products with values are a sum of their own, which is then added in float32.

Decode attention is bound by the bytes that it reads and multiplies in 16 bits. So do trees of tokens: they go
to paged_prefill.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fp8_attention import WEIGHT_SCALE
from kernels.fp8_cache import DTYPE, LARGEST
from kernels.gpu.dense_context import FEW_SEQUENCES, bring_context, context_base
from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two
from kernels.gpu.paged_prefill import paged_prefill
from kernels.gpu.round_rows import round_to, to_e4m3
from kernels.gpu.scores import LOG2_E_F32, score_factors, tanh
from kernels.gpu.tuning import look_up, prefill_bytes, program_memory, shape_class

FIRST_CARD = (8, 9)
"""Compute capability of the first cards that multiply FP8."""
_MOST_HEAD_DIM = 256
_LEAST_DEPTH = 32
"""Numbers of FP8 that one matrix instruction takes of a row."""
_PEAK = tl.constexpr(LARGEST)
_WEIGHT_BITS = tl.constexpr(math.log2(WEIGHT_SCALE))


def lacks_fp8(device: torch.device, head_dim: int) -> str | None:
    """Return why heads of `head_dim` are not multiplied in FP8 on `device`; None if they are."""
    if head_dim % 16 or head_dim > _MOST_HEAD_DIM:
        return f"heads of {head_dim}: multiples of 16 up to {_MOST_HEAD_DIM} are multiplied in FP8"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CARD:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"compute capability {found}: products of FP8 begin with 8.9"
    return None


@triton.jit
def _advance(
    acc, peak, total, q, position, key_row, value_row, column, seen_by, keys, values, factor, cap_scale,
    TILE: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys, from `key_row` on, and values, from `value_row` and `column` on, into the
    running softmax of every row.

    `acc [rows, dims]`, `peak [rows]` and `total [rows]` are the running sums, `q [rows, dims]` E4M3, `factor
    [rows]` that of its scores; `seen_by [rows]` is the last position that each row sees. BY_HAND as in
    `round_to`.
    """
    k = keys.load([key_row, 0])
    scores = tl.dot(q, k.T, max_num_imprecise_acc=D_PAD)
    if CAPPED:
        scores = tanh(scores * factor[:, None])
        factor = tl.zeros_like(factor) + cap_scale
    if MASKED:
        at = position + tl.arange(0, TILE)
        seen = at[None, :] <= seen_by[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > seen_by[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    if WINDOW > 0:
        # A row may have seen nothing yet: no number is subtracted from -inf then.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        anchor = higher
    weights = tl.exp2(scores * factor[:, None] - (anchor - _WEIGHT_BITS)[:, None])
    faded = tl.exp2(peak - anchor)
    total = total * faded + tl.sum(weights, axis=1)
    acc = acc * faded[:, None]
    if BY_HAND:
        weights = to_e4m3(weights)
    v = values.load([value_row, column])
    acc = tl.dot(weights.to(q.dtype), v.T, acc, max_num_imprecise_acc=TILE)
    return acc, higher, total


# One kernel whatever a step's packing happens to be, as in paged_decode.py.
@triton.jit(do_not_specialize=["starts", "offsets"])
def _fp8_prefill(
    query, keys, values, starts, offsets, scales, sinks, out, rows, score_scale, cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BY_HAND: tl.constexpr, TYPE: tl.constexpr, SEQUENCES_PAD: tl.constexpr,
):  # fmt: skip
    """Compute ROWS (token, head) pairs of one KV head of one sequence.

    `keys` E4M3 `[KV_HEADS, rows, D]` and `values` `[KV_HEADS, D, rows]`, `scales` float32 `[2, KV_HEADS]` of
    the layer; the other arguments and the grid are those of paged_prefill.py.
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
        numbers = tl.load(query + place, mask=mask, other=0.0).to(tl.float32)
        row_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), axis=1), 1e-12), _PEAK)
        scaled = tl.div_rn(numbers, tl.broadcast_to(row_scale[:, None], numbers.shape))
        q = round_to(scaled, _PEAK, TYPE, BY_HAND)

        factor = row_scale * (score_scale * tl.load(scales + head))
        value_scale = tl.load(scales + KV_HEADS + head)
        seen_by = start + token
        nearest = start + tile * ROWS // GROUP
        end = start + tl.minimum((tile * ROWS + ROWS - 1) // GROUP + 1, tokens)
        begin = 0
        # Tiles before this are seen whole by every row.
        diagonal = (nearest + 1) // TILE * TILE
        if WINDOW > 0:
            begin = tl.maximum(nearest - WINDOW + 1, 0) // TILE * TILE
            diagonal = begin

        base = context_base(starts, offsets, sequence, TILE, SEQUENCES_PAD)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for position in range(begin, diagonal, TILE):
            acc, peak, total = _advance(
                acc, peak, total, q, position, head * rows + base + position, head * D, base + position,
                seen_by, keys, values, factor, cap_scale, TILE, D_PAD, WINDOW, CAPPED, False, BY_HAND,
            )  # fmt: skip
        for position in range(diagonal, end, TILE):
            acc, peak, total = _advance(
                acc, peak, total, q, position, head * rows + base + position, head * D, base + position,
                seen_by, keys, values, factor, cap_scale, TILE, D_PAD, WINDOW, CAPPED, True, BY_HAND,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + head * GROUP + pair % GROUP) * LOG2_E_F32
            higher = tl.maximum(peak, sink)
            faded = tl.exp2(peak - higher)
            total = total * faded + tl.exp2(sink - higher + _WEIGHT_BITS)
            acc = acc * faded[:, None]
        # Rows that pad the tile may have seen nothing.
        result = acc * (value_scale / tl.where(real, total, 1.0))[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def fp8_tile(head_dim: int, memory: int) -> tuple[tuple[str, int], ...]:
    """Return the default tiles on a card that gives a program `memory` bytes; by arithmetic.

    128 rows of two warp groups; a tile's sum and the running one are 64 registers of a thread each, with
    heads of more than 128 half the rows. Tiles of keys are halved until they fit the memory.
    """
    rows, tile, stages = 64 if head_dim > 128 else 128, 128, 2
    while tile > _LEAST_DEPTH and prefill_bytes(head_dim, 1, rows, tile, stages) > memory - memory // 16:
        tile //= 2
    return (("rows", rows), ("tile", tile), ("num_warps", 8), ("num_stages", stages))


def fp8_prefill(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scales: torch.Tensor,
    max_tokens: int,
    context_tokens: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what `paged_prefill` does of `query [T, heads, head_dim]`, with products of FP8; see there for
    the other arguments and the result.

    `blocks` are E4M3, `scales` float32 `[layers, 2, kv_heads]`. Raises TypeError for other blocks.
    """
    if blocks.dtype != DTYPE:
        raise TypeError(f"keys and values of {blocks.dtype}: products of FP8 take a cache of {DTYPE}")
    _, heads, head_dim = check_dense("query", query).shape
    kv_heads, block_size = blocks.shape[-2], blocks.shape[-1] // head_dim
    group, sequences = heads // kv_heads, tables.shape[0]
    out = torch.empty_like(query) if out is None else check_dense("out", out)
    rule: dict[str, Any] = {"window": window, "base": base}
    if max_tokens == 0 or sequences == 0 or tree is not None:
        return paged_prefill(
            query, blocks, layer, tables, starts, offsets, max_tokens=max_tokens,
            context_tokens=context_tokens, scale=scale, cap=cap, sinks=sinks, scales=scales, tree=tree,
            out=out, **rule,
        )  # fmt: skip
    shapes = shape_class(head_dim, group, block_size, query.dtype, blocks.dtype)
    tuned = look_up(query.device, "fp8_prefill", shapes, fp8_tile(head_dim, program_memory(query.device)))
    tile, padded = tuned["tile"], power_of_two(head_dim, _LEAST_DEPTH)
    context = bring_context(
        blocks.view(torch.uint8), layer, tables, starts, offsets, head_dim=head_dim, tile=tile,
        dtype=torch.uint8, across=True,
        context_tokens=tables.numel() * block_size if context_tokens is None else context_tokens, **rule,
    )  # fmt: skip
    rows = context.keys.shape[1]
    keys = TensorDescriptor(
        context.keys.view(DTYPE), [kv_heads * rows, head_dim], [head_dim, 1], [tile, padded]
    )
    values = TensorDescriptor(
        context.values.view(DTYPE), [kv_heads * head_dim, rows], [rows, 1], [padded, tile]
    )
    _fp8_prefill[(triton.cdiv(max_tokens * group, tuned["rows"]), kv_heads, sequences)](
        query, keys, values, starts, offsets, scales[layer], query if sinks is None else sinks, out, rows,
        *score_factors(head_dim**-0.5 if scale is None else scale, cap), KV_HEADS=kv_heads, GROUP=group,
        D=head_dim, D_PAD=padded, ROWS=tuned["rows"], TILE=tile, WINDOW=window or 0, CAPPED=cap is not None,
        SINKS=sinks is not None, BY_HAND=INTERPRETED, TYPE=tl.float8e4nv,
        SEQUENCES_PAD=power_of_two(sequences, FEW_SEQUENCES), num_warps=tuned["num_warps"],
        num_stages=tuned["num_stages"],
    )  # fmt: skip
    return out
