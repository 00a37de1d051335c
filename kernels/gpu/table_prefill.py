"""Tiles of prefill attention that are read through the block table, of chunks too short to gather for.

paged_prefill.py reads gathered keys and values, which tiles share. Gathering is a launch, and moves every
byte of the context twice more. By arithmetic for an H200, a layer of an 8B model (32 query heads, 8 KV heads
of 128, 4 KiB a token of context):

- gathering: 2.5 µs a launch, and 8 KiB a token of context at 4 TB/s, 2.1 µs a thousand tokens;
- reading through the table: a quarter to a third more of attention's own time (measured, at 8,192 tokens).
  A program walks its context one tile of 64 keys after the other, some 0.8 µs each: 128 tokens over 2,048,
  four tiles of 128 rows a KV head, take 26 µs and 5 to 8 more, beside 6.8 of gathering; 512 tokens alone, 16
  tiles, 6 µs and 2 more, beside 3.6; 2,048 tokens, 64 tiles, 112 µs and 30 more, beside 6.8.

So up to MOST_TILES tiles of rows are read through the table, whatever their context: about equal for a lone
chunk over a long one, less for a lone short prompt, a third of the bytes where eight streams verify drafts
over 4,096 tokens each (134 MB a layer, 33 µs, in place of 402). No card has measured it; the tuner tries both
(`by_table`). The walk, its tiles and the order of sums are those of gathered keys, so that a token's numbers
do not depend on how its chunk was read.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_TILES = 16
"""Tiles of rows of a KV head up to which nothing is gathered: costs are equal, by the arithmetic above."""


@triton.jit
def table_tile(
    keys, values, table, position, length, block_stride, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return keys across, `[D_PAD, TILE]`, and values `[TILE, D_PAD]` of one KV head, from `position` on.

    `keys` and `values` are that head's place in block 0, `table` the sequence's row of blocks, `length` its
    tokens. MASKED tiles may reach beyond it: values there are zero, keys are whatever their block holds.
    """
    at = tl.multiple_of(position, TILE) + tl.arange(0, TILE)
    dims = tl.arange(0, D_PAD)
    lane = at % BLOCK_SIZE
    if MASKED:
        # Whole blocks: a mask of single tokens would cut the loads of keys into single numbers.
        held = at // BLOCK_SIZE * BLOCK_SIZE < length
        start = tl.load(table + at // BLOCK_SIZE, mask=held, other=0).to(tl.int64) * block_stride
        k_mask = (dims < D)[:, None] & held[None, :]
        v_mask = (at < length)[:, None] & (dims < D)[None, :]
    else:
        start = tl.load(table + at // BLOCK_SIZE).to(tl.int64) * block_stride
        k_mask, v_mask = (dims < D)[:, None], (dims < D)[None, :]
    k = tl.load(keys + start[None, :] + dims[:, None] * BLOCK_SIZE + lane[None, :], mask=k_mask, other=0.0)
    v = tl.load(values + start[:, None] + lane[:, None] * D + dims[None, :], mask=v_mask, other=0.0)
    return k, v
