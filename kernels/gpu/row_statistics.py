"""Statistics of whole rows of logits for sampling: a row is cut into parts, so that one row fills the device.

A few passes leave little to the program that samples (kernels/gpu/sample.py):

- `_part_statistics` finds the largest score of every part, and of every group of scores in it.
- `_floors` joins them. A greedy row is done. For a row under top-k, top-p or min-p it finds a score that what
  is kept surely reaches: of top-k, the k-th largest of the groups' largest (as many scores reach it at
  least); of top-p, the weight below which all tokens together have less than 1 - top_p; of min-p, itself.
- `weigh_levels` weighs what reaches each of some levels between the floor of top-p and the likeliest: the
  highest of them that still has top_p of the mass is a better floor.
- `_count` and `_gather` write the scores that reach it to the front of a list, in order of the ids. Mostly
  they are a few hundred of a hundred thousand. A row under temperature alone keeps all, and gets the sums of
  its columns instead (the order in which sampling/random.py sums).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import power_of_two
from kernels.gpu.sample_keys import GREEDY_BELOW, LEAST, ordered, threshold, weighed
from kernels.gpu.top_p_threshold import LEVELS, score_below, top_p_key, weigh_levels

PART = 4096
"""Logits that a program looks at."""
_GROUP = 256
_GROUPS = PART // _GROUP
"""Groups in a part."""
TABLE = 64
"""Rows of the table in which a long list of weights is summed (diptych/engine/sampling/random.py)."""

DONE, WHOLE, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Mode of a row: its token is known; it is sampled from all tokens; from those of its list."""


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of rows, and of each of their parts."""

    modes: torch.Tensor
    """int32 `[rows]`: DONE, WHOLE or LISTED."""
    highest: torch.Tensor
    """float32 `[rows]`: the largest score."""
    floors: torch.Tensor
    """int32 `[rows]`: the key that a score of the list reaches."""
    lowest: torch.Tensor
    """float32 `[rows]`: under top-p alone, the logarithm of the weight that it keeps at least; else 0."""
    wanted: torch.Tensor
    """float32 `[rows]`: under top-p alone, the mass that it keeps."""
    levels: torch.Tensor
    """float32 `[rows, parts, LEVELS]`: the mass of what reaches each."""
    peaks: torch.Tensor
    """float32 `[rows, parts]`."""
    firsts: torch.Tensor
    """int32 `[rows, parts]`: the first token with the part's largest score; -1 where one is not finite."""
    masses: torch.Tensor
    """float32 `[rows, parts]`: of the weights, the part's largest being 1."""
    groups: torch.Tensor
    """float32 `[rows, parts, _GROUPS]`: the largest score of each."""
    counts: torch.Tensor
    """int32 `[rows, parts]`: scores that reach the floor."""
    totals: torch.Tensor
    """float64 `[rows, parts]`: under top-p alone, of the weights, the row's largest being 1."""

    @classmethod
    def make(cls, rows: int, vocab: int, device: torch.device) -> RowStatistics:
        """Allocate statistics of up to `rows` rows of `vocab` logits."""
        parts = parts_of(vocab)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            modes=empty(rows, dtype=torch.int32),
            highest=empty(rows),
            floors=empty(rows, dtype=torch.int32),
            lowest=empty(rows),
            wanted=empty(rows),
            levels=empty(rows, parts, LEVELS),
            peaks=empty(rows, parts),
            firsts=empty(rows, parts, dtype=torch.int32),
            masses=empty(rows, parts),
            groups=empty(rows, parts, _GROUPS),
            counts=empty(rows, parts, dtype=torch.int32),
            totals=empty(rows, parts, dtype=torch.float64),
        )


def parts_of(vocab: int) -> int:
    """Return how many programs look at a row."""
    return -(-vocab // PART)


@triton.jit
def _part_statistics(
    logits, temperatures, top_ps, peaks, firsts, masses, groups, vocab, stride,
    PART: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Find peak, first token of it, mass and the groups' peaks of one part of one row.

    `logits [rows, vocab]`, `stride` elements a row; `temperatures` float32 and `top_ps` float64 `[rows]`; the
    results as in RowStatistics; grid `[parts, rows]`.
    """
    number = tl.program_id(1)
    slot = number * tl.num_programs(0) + tl.program_id(0)
    group = tl.arange(0, GROUPS)
    size: tl.constexpr = PART // GROUPS
    at = tl.program_id(0) * PART + group[:, None] * size + tl.arange(0, size)[None, :]
    inside = at < vocab
    x = tl.load(logits + number.to(tl.int64) * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    strange = tl.sum(tl.sum((inside & ((tl.abs(x) < float("inf")) == 0)).to(tl.int32), axis=1), axis=0)
    x = tl.where(x == x, x, float("-inf"))
    tops = tl.max(x, axis=1)
    peak = tl.max(tops, axis=0)
    first = tl.min(tl.min(tl.where(inside & (x == peak), at, vocab), axis=1), axis=0)
    tl.store(peaks + slot, peak)
    tl.store(firsts + slot, tl.where(strange > 0, -1, first))
    tl.store(groups + slot * GROUPS + group, tops)
    temperature = tl.load(temperatures + number)
    if (temperature >= GREEDY_BELOW) & (tl.load(top_ps + number) < 1.0):
        weights = tl.where(inside, tl.exp((x - peak) / temperature), 0.0)
        tl.store(masses + slot, tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _floors(
    temperatures, top_ks, top_ps, min_ps, peaks, firsts, masses, groups, modes, highests, floors, lowests,
    wanted, out, parts, vocab,
    PARTS_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row to its mode, its peak and the floor of its list.

    `temperatures`, `top_ks`, `top_ps` and `min_ps` are `[rows]`, as in kernels/gpu/sample.py; the others as
    in RowStatistics; `out` int64 `[rows]`; grid `[rows]`.
    """
    number = tl.program_id(0)
    base = number * parts
    part = tl.arange(0, PARTS_PAD)
    there = part < parts
    peak = tl.load(peaks + base + part, mask=there, other=float("-inf"))
    first = tl.load(firsts + base + part, mask=there, other=0)
    highest = tl.max(peak, axis=0)
    # The lowest id of the likeliest; -1 where a part has a score that is not finite.
    token = tl.min(tl.where(there & (peak == highest), first, vocab), axis=0)
    token = tl.where(tl.min(first, axis=0) < 0, -1, token)
    temperature = tl.load(temperatures + number)
    mode = tl.full([], 0, tl.int32)
    floor = tl.full([], LEAST, tl.int32)
    lowest = tl.zeros([], tl.float32)
    if (token >= 0) & (temperature >= GREEDY_BELOW):
        top_k = tl.load(top_ks + number)
        top_p = tl.load(top_ps + number)
        min_p = tl.load(min_ps + number)
        mode += 1
        if (top_k > 0) & (top_k < vocab):
            mode += 1
            if top_k <= (vocab + GROUP - 1) // GROUP:
                floor = threshold(
                    groups + base * GROUPS, parts * GROUPS, highest, temperature, floor, top_k, False, TILE
                )
        elif top_p < 1.0:
            mode += 1
            mass = tl.load(masses + base + part, mask=there, other=0.0) * tl.exp(
                (peak - highest) / temperature
            )
            total = tl.sum(mass, axis=0)
            # Half of the bound, so that rounding cannot matter.
            lowest = tl.log(0.5 * (1.0 - top_p).to(tl.float32) / vocab * total)
            tl.store(wanted + number, top_p.to(tl.float32) * total)
        elif min_p > 0.0:
            mode += 1
            floor = ordered(score_below(highest, temperature, tl.log(min_p)))
    tl.store(modes + number, mode)
    tl.store(highests + number, highest)
    tl.store(floors + number, floor)
    tl.store(lowests + number, lowest)
    tl.store(out + number, token.to(tl.int64))


@triton.jit
def _count(
    logits, temperatures, modes, highests, floors, lowests, wanted, levels, counts, totals, columns_out,
    parts, vocab, stride, columns_stride,
    PART: tl.constexpr, TABLE: tl.constexpr, PARTS_PAD: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Count and weigh what reaches the floor in one part of one row; of a WHOLE row sum the columns.

    `logits [rows, vocab]`, `stride` elements a row; `columns_out` float64 `[rows, columns_stride]`; the
    others as in RowStatistics; grid `[parts, rows]`.
    """
    number = tl.program_id(1)
    mode = tl.load(modes + number)
    row = logits + number.to(tl.int64) * stride
    highest = tl.load(highests + number)
    temperature = tl.load(temperatures + number)
    if mode == LISTED:
        slot = number * tl.num_programs(0) + tl.program_id(0)
        at = tl.program_id(0) * PART + tl.arange(0, PART)
        inside = at < vocab
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        floor = tl.load(floors + number)
        lowest = tl.load(lowests + number)
        if lowest < 0.0:
            above = levels + number * parts * LEVELS
            mass = tl.load(wanted + number)
            floor = top_p_key(above, mass, highest, temperature, lowest, parts, PARTS_PAD, LEVELS)
            # All programs of the row find the same, and none reads this one before the next launch.
            tl.store(floors + number, floor, mask=tl.program_id(0) == 0)
            weights, _ = weighed(x, inside, highest, temperature, LEAST)
            tl.store(totals + slot, tl.sum(weights.to(tl.float64), axis=0))
        left = inside & (ordered(x) >= floor)
        tl.store(counts + slot, tl.sum(left.to(tl.int32), axis=0))
    elif mode == WHOLE:
        columns = vocab // TABLE
        column = tl.program_id(0) * (PART // TABLE) + tl.arange(0, PART // TABLE)
        inside = column < columns
        place = tl.arange(0, TABLE)[:, None] * columns + column[None, :]
        x = tl.load(row + place, mask=inside[None, :], other=0.0).to(tl.float32)
        sums = tl.sum(tl.exp((x - highest) / temperature).to(tl.float64), axis=0)
        tl.store(columns_out + number.to(tl.int64) * columns_stride + column, sums, mask=inside)


@triton.jit
def _gather(
    logits, modes, floors, counts, scores, ids, parts, vocab, stride, list_stride,
    PART: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """Write the scores of one part that reach the floor to the row's list, in order of the ids.

    `logits [rows, vocab]`; `scores` float32 and `ids` int32 `[rows, list_stride]`; the others as in
    RowStatistics; grid `[parts, rows]`.
    """
    number = tl.program_id(1)
    if tl.load(modes + number) == LISTED:
        part = tl.arange(0, PARTS_PAD)
        here = tl.program_id(0)
        before = tl.sum(tl.load(counts + number * parts + part, mask=part < here, other=0), axis=0)
        at = here * PART + tl.arange(0, PART)
        inside = at < vocab
        x = tl.load(logits + number.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
        left = inside & (ordered(x) >= tl.load(floors + number))
        one = left.to(tl.int32)
        place = number.to(tl.int64) * list_stride + before + tl.cumsum(one, axis=0) - one
        tl.store(scores + place, x, mask=left)
        tl.store(ids + place, at, mask=left)


def compute_row_statistics(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    found: RowStatistics,
    scores: torch.Tensor,
    ids: torch.Tensor,
    columns: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fill `found` for rows of `logits [rows, vocab]`.

    `temperature`, `top_k`, `top_p` and `min_p` are `[rows]`, as in kernels/gpu/sample.py. LISTED rows get
    lists, `scores` float32 and `ids` int32 `[at least rows, at least vocab]`, WHOLE ones `columns`, float64
    `[at least rows, at least vocab // TABLE]`. `out`, int64 `[rows]`, is the likeliest token, or -1 where a
    logit is not finite.
    """
    rows, vocab = logits.shape
    parts = parts_of(vocab)
    grid, stride, padded = (parts, rows), logits.stride(0), power_of_two(parts, 16)
    _part_statistics[grid](
        logits, temperature, top_p, found.peaks, found.firsts, found.masses, found.groups, vocab, stride,
        PART=PART, GROUPS=_GROUPS, num_warps=8,
    )  # fmt: skip
    _floors[(rows,)](
        temperature, top_k, top_p, min_p, found.peaks, found.firsts, found.masses, found.groups, found.modes,
        found.highest, found.floors, found.lowest, found.wanted, out, parts, vocab, PARTS_PAD=padded,
        GROUPS=_GROUPS, GROUP=_GROUP, TILE=min(1024, power_of_two(parts * _GROUPS)), num_warps=4,
    )  # fmt: skip
    weigh_levels[grid](
        logits, temperature, found.highest, found.lowest, found.levels, vocab, stride, PART=PART,
        LEVELS=LEVELS, TILE=256, num_warps=8,
    )  # fmt: skip
    _count[grid](
        logits, temperature, found.modes, found.highest, found.floors, found.lowest, found.wanted,
        found.levels, found.counts, found.totals, columns, parts, vocab, stride, columns.stride(0), PART=PART,
        TABLE=TABLE, PARTS_PAD=padded, LEVELS=LEVELS, num_warps=8,
    )  # fmt: skip
    _gather[grid](
        logits, found.modes, found.floors, found.counts, scores, ids, parts, vocab, stride, scores.stride(0),
        PART=PART, PARTS_PAD=padded, num_warps=8,
    )  # fmt: skip
