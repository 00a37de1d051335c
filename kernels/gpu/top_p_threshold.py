"""Threshold of top-p, roughly: the mass above each of some levels, found by many programs a row.

The nucleus lies above a weight of (1 - top_p) / vocabulary, but where a distribution is flat a tenth of all
tokens do. Between that weight and the likeliest token lie LEVELS levels, evenly spaced by their scores; above
the highest of them that still has top_p of the mass lies all that is kept, and little else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sample_keys import LEAST, ordered, weighed

LEVELS = 16


@triton.jit
def score_below(highest, temperature, log_weight):
    """Return a score whose weight surely has a logarithm below `log_weight`, however it is rounded."""
    return highest + temperature * (log_weight - 0.01) - tl.abs(highest) * 1e-6


@triton.jit
def _level_scores(highest, temperature, lowest, LEVELS: tl.constexpr):
    """Return the LEVELS scores from the floor of top-p on, evenly spaced up to the likeliest token's."""
    share = 1.0 - tl.arange(0, LEVELS).to(tl.float32) / LEVELS
    return score_below(highest, temperature, lowest * share)


@triton.jit
def top_p_key(
    levels, wanted, highest, temperature, lowest, parts, PARTS_PAD: tl.constexpr, LEVELS: tl.constexpr
):
    """Return the key of the highest level above which lies all that top-p keeps.

    `levels` float32 `[parts, LEVELS]` of one row, `wanted` the mass that top-p keeps.
    """
    part, level = tl.arange(0, PARTS_PAD), tl.arange(0, LEVELS)
    place = levels + part[:, None] * LEVELS + level[None, :]
    mass = tl.sum(tl.load(place, mask=(part < parts)[:, None], other=0.0), axis=0)
    # What rounding may have added to a sum of so many is a hundred times less.
    enough = tl.maximum(tl.sum((mass >= wanted * 1.0001).to(tl.int32), axis=0) - 1, 0)
    scores = _level_scores(highest, temperature, lowest, LEVELS)
    return ordered(tl.sum(tl.where(level == enough, scores, 0.0), axis=0))


@triton.jit
def weigh_levels(
    logits, temperatures, highests, lowests, levels, vocab, stride,
    PART: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weigh what reaches each level in one part of one row.

    `logits [rows, vocab]`, `stride` elements a row; `temperatures`, `highests` and `lowests` float32
    `[rows]`, `levels` float32 `[rows, parts, LEVELS]`; grid `[parts, rows]`.
    """
    number = tl.program_id(1)
    lowest = tl.load(lowests + number)
    if lowest < 0.0:
        highest = tl.load(highests + number)
        temperature = tl.load(temperatures + number)
        scores = _level_scores(highest, temperature, lowest, LEVELS)
        mass = tl.zeros([LEVELS], tl.float32)
        for start in range(0, PART, TILE):
            at = tl.program_id(0) * PART + start + tl.arange(0, TILE)
            inside = at < vocab
            x = tl.load(logits + number.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
            weights, _ = weighed(x, inside, highest, temperature, LEAST)
            mass += tl.sum(tl.where(x[:, None] >= scores[None, :], weights[:, None], 0.0), axis=0)
        slot = number * tl.num_programs(0) + tl.program_id(0)
        tl.store(levels + slot * LEVELS + tl.arange(0, LEVELS), mass)
