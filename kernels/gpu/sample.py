"""One token a row of logits, on the device: greedy, or drawn after temperature, top-k, top-p and min-p.

What it means is engine/sampling/draw.py: the same random number, the same tokens kept (with everything that
ties at top-k, the lower ids at top-p), the distribution inverted in the same order. One program takes one
row, so nothing depends on neighbours. No sorting: the score or the weight at which a set ends is found four
bits at a time, by counting (or weighing) what reaches each of sixteen thresholds in one pass over the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense
from kernels.gpu.uniform import uniform

NOT_FINITE = -1
"""The token of a row whose logits are not all finite."""

_GREEDY_BELOW = tl.constexpr(1e-5)
_LEAST = tl.constexpr(-2147483648)
_LARGEST_WEIGHT = tl.constexpr(0x3F800000)
"""The bits of 1.0."""
_TABLE = tl.constexpr(64)
"""Rows of the table in which a long list of weights is summed (draw.py)."""
_TILE = 1024
_ROWS = 32


@dataclass(frozen=True)
class SampleScratch:
    """What is left of each row's distribution, in order of the ids: allocated once, used by every step."""

    weights: torch.Tensor
    """float32 `[rows, vocab]`."""
    ids: torch.Tensor
    """int32 `[rows, vocab]`."""
    uniforms: torch.Tensor
    """float64 `[rows]`: the random number of each row."""


def make_scratch(rows: int, vocab: int, device: torch.device) -> SampleScratch:
    """Scratch for up to `rows` rows of `vocab` logits."""
    return SampleScratch(
        torch.empty(rows, vocab, device=device),
        torch.empty(rows, vocab, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
    )


@triton.jit(do_not_specialize=["seeds", "positions", "out", "rows"])
def _uniforms(seeds, positions, out, rows, ROWS: tl.constexpr):
    """The random numbers of all rows: a chain of 1,500 dependent steps, so every row has a thread."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.uint64)
    tl.store(out + row, uniform(seed, position), mask=inside)


@triton.jit
def _ordered(x):
    """int32 in the order of the float32 `x`, minus zero being zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weighed(x, inside, highest, temperature, floor):
    """Weights of a tile of scores, the likeliest token's being 1, and which of them top-k leaves."""
    left = inside & (_ordered(x) >= floor)
    return tl.where(left, tl.exp((x - highest) / temperature), 0.0), left


@triton.jit
def _threshold(row, vocab, highest, temperature, floor, wanted, MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest number that, as a key, tokens of `wanted` count or mass reach or pass.

    Keys are ordered scores, or with MASS the bits of the weights of what `floor` leaves.
    """
    digits = tl.arange(0, 16)
    found = tl.full([], _LEAST, tl.int32)
    for step in range(8):
        tried = found + (digits << (28 - 4 * step))
        reached = tl.zeros([16], tl.float64)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < vocab
            x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
            if MASS:
                weight, left = _weighed(x, inside, highest, temperature, floor)
                key = weight.to(tl.int32, bitcast=True)
            else:
                weight = tl.full([TILE], 1.0, tl.float32)
                left = inside
                key = _ordered(x)
            passes = left[:, None] & (key[:, None] >= tried[None, :])
            reached += tl.sum(tl.where(passes, weight[:, None], 0.0), axis=0).to(tl.float64)
        # What is reached falls with the digit; the first threshold is that of the step before.
        digit = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), axis=0) - 1, 0)
        found += digit << (28 - 4 * step)
    return found


@triton.jit
def _above(row, vocab, highest, temperature, floor, key, TILE: tl.constexpr):
    """The mass of the weights whose bits are above `key`, of what `floor` leaves."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < vocab
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        weight, left = _weighed(x, inside, highest, temperature, floor)
        heavier = left & (weight.to(tl.int32, bitcast=True) > key)
        mass += tl.sum(tl.where(heavier, weight, 0.0), axis=0).to(tl.float64)
    return mass


@triton.jit
def _pack(row, weights, ids, vocab, highest, temperature, floor, border, ties, min_p, TILE: tl.constexpr):
    """Write what is kept to the front of `weights` and `ids`, in order of the ids; how many there are."""
    count = tl.zeros([], tl.int32)
    tied = tl.zeros([], tl.int64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < vocab
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        weight, left = _weighed(x, inside, highest, temperature, floor)
        key = weight.to(tl.int32, bitcast=True)
        level = (left & (key == border)).to(tl.int64)
        earlier = tied + tl.cumsum(level, axis=0) - level
        tied += tl.sum(level, axis=0)
        kept = left & ((key > border) | ((key == border) & (earlier < ties))) & (weight >= min_p)
        one = kept.to(tl.int32)
        place = count + tl.cumsum(one, axis=0) - one
        tl.store(weights + place, weight, mask=kept)
        tl.store(ids + place, at, mask=kept)
        count += tl.sum(one, axis=0)
    return count


@triton.jit
def _passes(sums, inside, target, end):
    """The first place of a running sum above `target`, but none beyond the last that added something."""
    passed = tl.sum((inside & (sums <= target)).to(tl.int32), axis=0)
    return tl.minimum(passed, tl.sum((inside & (sums < end)).to(tl.int32), axis=0))


@triton.jit
def _column_sums(weights, columns, start, TILE: tl.constexpr):
    """The running sum of TILE columns of the table from `start` on, float64."""
    column = start + tl.arange(0, TILE)
    inside = column < columns
    place = weights + tl.arange(0, _TABLE)[:, None] * columns + column[None, :]
    table = tl.load(place, mask=inside[None, :], other=0.0).to(tl.float64)
    return tl.cumsum(tl.sum(table, axis=0), axis=0), inside


@triton.jit
def _invert(weights, count, at, TILE: tl.constexpr):
    """The place where the running sum of `weights` passes `at` of their total, in the order of draw.py."""
    columns = count // _TABLE
    line = tl.arange(0, _TABLE)
    rest = count - columns * _TABLE
    in_rest = line < rest
    last = tl.load(weights + columns * _TABLE + line, mask=in_rest, other=0.0).to(tl.float64)
    total = tl.zeros([], tl.float64)
    for start in range(0, columns, TILE):
        sums, _ = _column_sums(weights, columns, start, TILE)
        total += tl.max(sums, axis=0)
    end = total + tl.sum(last, axis=0)
    target = at * end

    # The columns come first, then what is left over as one more.
    passed = tl.zeros([], tl.int32)
    reaching = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    base = tl.zeros([], tl.float64)
    for start in range(0, columns, TILE):
        sums, inside = _column_sums(weights, columns, start, TILE)
        sums = base + sums
        passed += tl.sum((inside & (sums <= target)).to(tl.int32), axis=0)
        reaching += tl.sum((inside & (sums < end)).to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(inside & (sums <= target), sums, 0.0), axis=0))
        base = tl.max(sums, axis=0)
    column = tl.minimum(passed, reaching)
    in_table = column < columns
    stride = tl.where(in_table, columns, 1)
    first = tl.where(in_table, column, columns * _TABLE)
    inside = line < tl.where(in_table, _TABLE, rest)
    inner = tl.cumsum(tl.load(weights + first + line * stride, mask=inside, other=0.0).to(tl.float64), axis=0)
    height = tl.max(inner, axis=0)
    return first + stride * _passes(inner, inside, target - before, height)


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "uniforms", "out"])
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    weights,
    ids,
    out,
    vocab,
    stride,
    scratch_stride,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * stride
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    strange = tl.zeros([], tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < vocab
        x = tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32)
        strange += tl.sum((inside & ((tl.abs(x) < float("inf")) == 0)).to(tl.int32), axis=0)
        top = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
        first = tl.min(tl.where(inside & (x == top), at, vocab), axis=0)
        token = tl.where(top > highest, first, token)
        highest = tl.maximum(highest, top)
    temperature = tl.load(temperatures + number)
    if strange > 0:
        token = token * 0 - 1
    elif temperature >= _GREEDY_BELOW:
        top_k = tl.load(top_ks + number)
        top_p = tl.load(top_ps + number).to(tl.float64)
        min_p = tl.load(min_ps + number)
        floor = tl.full([], _LEAST, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            floor = _threshold(row, vocab, highest, temperature, floor, top_k, False, TILE)
        border = tl.full([], -1, tl.int32)
        ties = tl.zeros([], tl.int64)
        if top_p < 1.0:
            enough = top_p * _above(row, vocab, highest, temperature, floor, -1, TILE)
            border = _threshold(row, vocab, highest, temperature, floor, enough, True, TILE)
            # The likeliest token is always kept.
            border = tl.minimum(border, _LARGEST_WEIGHT)
            level = border.to(tl.float32, bitcast=True).to(tl.float64)
            lacking = enough - _above(row, vocab, highest, temperature, floor, border, TILE)
            ties = tl.maximum(tl.ceil(lacking / tl.maximum(level, 1e-300)), 1.0).to(tl.int64)
            # Nothing reached it (rounding), or what it ends among weighs nothing: all are kept.
            ties = tl.where(border <= 0, 2147483647, ties)
            border = tl.maximum(border, 0)
        offset = number.to(tl.int64) * scratch_stride
        count = _pack(
            row, weights + offset, ids + offset, vocab, highest, temperature, floor, border, ties, min_p, TILE
        )
        # What other threads of this program wrote is read from here on.
        tl.debug_barrier()
        at = tl.load(uniforms + number)
        token = tl.load(ids + offset + _invert(weights + offset, count, at, COLUMNS))
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
    """The token of each row of `logits [rows, vocab]`: int64 `[rows]`, NOT_FINITE where a logit is.

    One number a row each: `temperature` float32 (below 1e-5 is greedy: the likeliest, of equals the lowest
    id), `top_k` int32 (0 is off), `top_p` float32 (1 is off), `min_p` float32 (0 is off), `seeds` int64 (the
    bits of the unsigned seed), `positions` int32 or int64 (tokens emitted so far: the counter of the draw).
    """
    rows, vocab = check_dense("logits", logits).shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    scratch = scratch or make_scratch(rows, vocab, logits.device)
    if scratch.ids.shape[0] < rows or scratch.ids.shape[1] < vocab:
        raise ValueError(f"scratch {tuple(scratch.ids.shape)} is too small for {rows} rows of {vocab}")
    _uniforms[(triton.cdiv(rows, _ROWS),)](seeds, positions, scratch.uniforms, rows, ROWS=_ROWS, num_warps=1)
    _sample[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        scratch.uniforms,
        scratch.weights,
        scratch.ids,
        out,
        vocab,
        logits.stride(0),
        scratch.ids.stride(0),
        TILE=_TILE,
        COLUMNS=16 if INTERPRETED else 64,
        num_warps=8,
    )
    return out
