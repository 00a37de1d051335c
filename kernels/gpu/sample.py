"""Sampling of one token a row of logits on the device: greedy, or by temperature, top-k, top-p and min-p.

The meaning is diptych/engine/sampling/random.py: the same random number, the same tokens kept (with
everything that ties at top-k, the lower ids at top-p), the distribution inverted in the same order. Nothing
depends on neighbours. kernels/gpu/row_statistics.py looks at whole rows, many programs a row; one program a
row samples from what that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two
from kernels.gpu.row_statistics import (
    DONE,
    LISTED,
    TABLE,
    WHOLE,
    RowStatistics,
    compute_row_statistics,
    parts_of,
)
from kernels.gpu.sample_keys import LEAST, mass_above, threshold, weighed
from kernels.gpu.uniform import uniform

NOT_FINITE = -1
"""The token of a row whose logits are not all finite."""

_LARGEST_WEIGHT = tl.constexpr(0x3F800000)
"""The bits of 1.0."""
_TILE = 1024
_COLUMNS = 64
_ROWS = 32


@dataclass(frozen=True)
class SampleScratch:
    """Statistics and lists of each row's distribution: allocated once, used by every step."""

    statistics: RowStatistics
    scores: torch.Tensor
    """float32 `[rows, vocab]`: of the tokens that may be kept, in order of the ids; then their weights."""
    ids: torch.Tensor
    """int32 `[rows, vocab]`."""
    columns: torch.Tensor
    """float64 `[rows, vocab // TABLE + 1]`: sums of the columns of weights."""
    uniforms: torch.Tensor
    """float64 `[rows]`: the random number of each row."""


def make_scratch(rows: int, vocab: int, device: torch.device) -> SampleScratch:
    """Allocate scratch for up to `rows` rows of `vocab` logits."""
    return SampleScratch(
        RowStatistics.make(rows, vocab, device),
        torch.empty(rows, vocab, device=device),
        torch.empty(rows, vocab, dtype=torch.int32, device=device),
        torch.empty(rows, vocab // TABLE + 1, dtype=torch.float64, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
    )


@triton.jit(do_not_specialize=["seeds", "positions", "out", "rows"])
def _uniforms(seeds, positions, out, rows, ROWS: tl.constexpr):
    """Compute the random numbers of all rows: a chain of 1,500 dependent steps, so every row has a thread.

    `seeds` int64, `positions` integers and `out` float64 are `[rows]`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.uint64)
    tl.store(out + row, uniform(seed, position), mask=inside)


@triton.jit
def _nucleus(scores, count, highest, temperature, floor, top_p, mass, TILE: tl.constexpr):
    """Return the bits of the weight that ends the set with `top_p` of `mass`, and how many of that weight it
    has.

    `scores` float32 `[count]`; `floor` is a key (sample_keys.py), `mass` the sum of all weights.
    """
    enough = top_p * mass
    border = threshold(scores, count, highest, temperature, floor, enough, True, TILE)
    # The likeliest token is always kept.
    border = tl.minimum(border, _LARGEST_WEIGHT)
    level = border.to(tl.float32, bitcast=True).to(tl.float64)
    lacking = enough - mass_above(scores, count, highest, temperature, floor, border, TILE)
    ties = tl.maximum(tl.ceil(lacking / tl.maximum(level, 1e-300)), 1.0).to(tl.int64)
    # Nothing reached it (rounding), or what it ends among weighs nothing: all are kept.
    ties = tl.where(border <= 0, 2147483647, ties)
    return tl.maximum(border, 0), ties


@triton.jit
def _keep(scores, ids, listed, highest, temperature, floor, border, ties, min_p, TILE: tl.constexpr):
    """Move what is kept to the front of `scores` and `ids [listed]`, weights in place of scores; return the
    count.
    """
    count = tl.zeros([], tl.int32)
    tied = tl.zeros([], tl.int64)
    for start in range(0, listed, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < listed
        x = tl.load(scores + at, mask=inside, other=0.0)
        token = tl.load(ids + at, mask=inside, other=0)
        weight, left = weighed(x, inside, highest, temperature, floor)
        key = weight.to(tl.int32, bitcast=True)
        level = (left & (key == border)).to(tl.int64)
        earlier = tied + tl.cumsum(level, axis=0) - level
        tied += tl.sum(level, axis=0)
        kept = left & ((key > border) | ((key == border) & (earlier < ties))) & (weight >= min_p)
        one = kept.to(tl.int32)
        place = count + tl.cumsum(one, axis=0) - one
        # A place of this tile may be one that another thread has yet to read.
        tl.debug_barrier()
        tl.store(scores + place, weight, mask=kept)
        tl.store(ids + place, token, mask=kept)
        count += tl.sum(one, axis=0)
    # What other threads of this program wrote is read from here on.
    tl.debug_barrier()
    return count


@triton.jit
def _sum_columns(weights, columns, out, TABLE: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum `weights [TABLE, columns]` over its rows into `out`, float64 `[columns]`, COLUMNS at a time."""
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        place = weights + tl.arange(0, TABLE)[:, None] * columns + column[None, :]
        table = tl.load(place, mask=inside[None, :], other=0.0).to(tl.float64)
        tl.store(out + column, tl.sum(table, axis=0), mask=inside)
    tl.debug_barrier()


@triton.jit
def _weights(row, weights, at, line, count, mode, highest, temperature):
    """Return the float64 weights at the first `count` of the places `at`, of all tokens of a row or of a
    list's.
    """
    # Bounds, not conditions: the interpreter cannot mask by a scalar.
    of_row = tl.where(mode == WHOLE, count, 0)
    x = tl.load(row + at, mask=line < of_row, other=0.0).to(tl.float32)
    listed = tl.load(weights + at, mask=line < count - of_row, other=0.0)
    weighed_now = tl.where(line < of_row, tl.exp((x - highest) / temperature), 0.0)
    return (weighed_now + listed).to(tl.float64)


@triton.jit
def _passes(sums, inside, target, end):
    """Return the first place of a running sum above `target`, at most the last that added something."""
    passed = tl.sum((inside & (sums <= target)).to(tl.int32), axis=0)
    return tl.minimum(passed, tl.sum((inside & (sums < end)).to(tl.int32), axis=0))


@triton.jit
def _column(sums, columns, target, end, TILE: tl.constexpr):
    """Return the column where the running sum of `sums [columns]` passes `target`, and the sum before."""
    passed = tl.zeros([], tl.int32)
    reaching = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    base = tl.zeros([], tl.float64)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < columns
        running = base + tl.cumsum(tl.load(sums + column, mask=inside, other=0.0), axis=0)
        passed += tl.sum((inside & (running <= target)).to(tl.int32), axis=0)
        reaching += tl.sum((inside & (running < end)).to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(inside & (running <= target), running, 0.0), axis=0))
        base = tl.max(running, axis=0)
    return tl.minimum(passed, reaching), before


@triton.jit
def _invert(
    row, weights, sums, count, mode, highest, temperature, at, TABLE: tl.constexpr, TILE: tl.constexpr
):
    """Return the place where the running sum of the weights passes `at` of their total, as sampling/random.py
    sums.
    """
    columns = count // TABLE
    line = tl.arange(0, TABLE)
    rest = count - columns * TABLE
    last = _weights(row, weights, columns * TABLE + line, line, rest, mode, highest, temperature)
    total = tl.zeros([], tl.float64)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        total += tl.max(tl.cumsum(tl.load(sums + column, mask=column < columns, other=0.0), axis=0), axis=0)
    end = total + tl.sum(last, axis=0)
    # The columns come first, then what is left over as one more.
    target = at * end
    column, before = _column(sums, columns, target, end, TILE)
    in_table = column < columns
    stride = tl.where(in_table, columns, 1)
    first = tl.where(in_table, column, columns * TABLE)
    height = tl.where(in_table, TABLE, rest)
    inner = tl.cumsum(
        _weights(row, weights, first + line * stride, line, height, mode, highest, temperature), axis=0
    )
    return first + stride * _passes(inner, line < height, target - before, tl.max(inner, axis=0))


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, modes, highests, counts, totals, scores, ids, columns,
    uniforms, out, parts, vocab, stride, list_stride, columns_stride, PARTS_PAD: tl.constexpr,
    TABLE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sample one row that is not DONE.

    `logits [rows, vocab]`, `stride` elements a row; `temperatures`, `top_ks`, `top_ps`, `min_ps` and
    `uniforms` are `[rows]`, statistics as in RowStatistics; `scores` and `ids [rows, list_stride]`, `columns`
    float64 `[rows, columns_stride]`, `out` int64 `[rows]`; grid `[rows]`.
    """
    number = tl.program_id(0)
    mode = tl.load(modes + number)
    if mode != DONE:
        highest = tl.load(highests + number)
        temperature = tl.load(temperatures + number)
        row = logits + number.to(tl.int64) * stride
        scores += number.to(tl.int64) * list_stride
        ids += number.to(tl.int64) * list_stride
        sums = columns + number.to(tl.int64) * columns_stride
        count = vocab + tl.zeros([], tl.int32)
        if mode == LISTED:
            part = tl.arange(0, PARTS_PAD)
            there = part < parts
            count = tl.sum(tl.load(counts + number * parts + part, mask=there, other=0), axis=0)
            top_k = tl.load(top_ks + number)
            top_p = tl.load(top_ps + number)
            floor = tl.full([], LEAST, tl.int32)
            border = tl.full([], -1, tl.int32)
            ties = tl.zeros([], tl.int64)
            picks = (top_k > 0) & (top_k < vocab)
            if picks:
                floor = threshold(scores, count, highest, temperature, floor, top_k, False, TILE)
            if top_p < 1.0:
                # Of what top-k leaves, which is in the list; without top-k of the whole row, which is not.
                if picks:
                    mass = mass_above(scores, count, highest, temperature, floor, -1, TILE)
                else:
                    mass = tl.sum(tl.load(totals + number * parts + part, mask=there, other=0.0), axis=0)
                border, ties = _nucleus(scores, count, highest, temperature, floor, top_p, mass, TILE)
            min_p = tl.load(min_ps + number)
            count = _keep(scores, ids, count, highest, temperature, floor, border, ties, min_p, TILE)
            _sum_columns(scores, count // TABLE, sums, TABLE, COLUMNS)
        at = tl.load(uniforms + number)
        place = _invert(row, scores, sums, count, mode, highest, temperature, at, TABLE, TILE)
        token = place
        if mode == LISTED:
            token = tl.load(ids + place)
        tl.store(out + number, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    scratch: SampleScratch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token of each row of `logits [rows, vocab]`: int64 `[rows]`, NOT_FINITE where not all are
    finite.

    One number a row each: `temperature` float32 (below 1e-5 is greedy: the likeliest, of equals the lowest
    id), `top_k` int32 (0 is off), `top_p` float64 (1 is off; in float32 a mass near 1 would be another one),
    `min_p` float32 (0 is off), `seeds` int64 (the bits of the unsigned seed), `positions` int32 or int64
    (tokens emitted so far: the counter of the random number).
    """
    rows, vocab = check_dense("logits", logits).shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    scratch = scratch or make_scratch(rows, vocab, logits.device)
    if scratch.ids.shape[0] < rows or scratch.ids.shape[1] < vocab:
        raise ValueError(f"scratch {tuple(scratch.ids.shape)} is too small for {rows} rows of {vocab}")
    found, scores, ids, columns = scratch.statistics, scratch.scores, scratch.ids, scratch.columns
    _uniforms[(triton.cdiv(rows, _ROWS),)](seeds, positions, scratch.uniforms, rows, ROWS=_ROWS, num_warps=1)
    compute_row_statistics(logits, temperature, top_k, top_p, min_p, found, scores, ids, columns, out)
    _sample[(rows,)](
        logits, temperature, top_k, top_p, min_p, found.modes, found.highest, found.counts, found.totals,
        scores, ids, columns, scratch.uniforms, out, parts_of(vocab), vocab, logits.stride(0),
        scores.stride(0), columns.stride(0), PARTS_PAD=power_of_two(parts_of(vocab), 16), TABLE=TABLE,
        TILE=_TILE, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out
