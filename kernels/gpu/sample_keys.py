"""Keys of scores, whole numbers in their order, their weights, and where a count or a mass of them is
reached.
"""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)
"""A temperature below this takes the likeliest token."""
LEAST = tl.constexpr(-2147483648)
"""A floor that every score reaches."""


@triton.jit
def ordered(x):
    """Return int32 in the order of the float32 `x [...]`, minus zero being zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weighed(x, inside, highest, temperature, floor):
    """Return the weights of a tile `x [n]` of scores, the likeliest token's being 1, and which reach the key
    `floor`.
    """
    left = inside & (ordered(x) >= floor)
    return tl.where(left, tl.exp((x - highest) / temperature), 0.0), left


@triton.jit
def threshold(scores, count, highest, temperature, floor, wanted, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest number that, as a key, so many of `count` scores reach or pass as are `wanted`.

    `scores` float32 `[count]`. Keys are ordered scores and `wanted` is their number; or with MASS keys are
    the bits of the weights of what `floor` leaves, and `wanted` is a mass of them. No sorting: four bits of
    the key are found at a time, by counting (or weighing) what reaches each of sixteen thresholds in one pass
    over the scores.
    """
    digits = tl.arange(0, 16)
    found = tl.full([], LEAST, tl.int32)
    for step in range(8):
        tried = found + (digits << (28 - 4 * step))
        reached = tl.zeros([16], tl.float64)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < count
            x = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
            if MASS:
                weight, left = weighed(x, inside, highest, temperature, floor)
                key = weight.to(tl.int32, bitcast=True)
                passes = left[:, None] & (key[:, None] >= tried[None, :])
                # Sums of float32 would be off by whole tokens where top-p is near 1.
                reached += tl.sum(tl.where(passes, weight[:, None], 0.0).to(tl.float64), axis=0)
            else:
                passes = inside[:, None] & (ordered(x)[:, None] >= tried[None, :])
                reached += tl.sum(passes.to(tl.int32), axis=0).to(tl.float64)
        # What is reached falls with the digit; the first threshold is that of the step before.
        digit = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), axis=0) - 1, 0)
        found += digit << (28 - 4 * step)
    return found


@triton.jit
def mass_above(scores, count, highest, temperature, floor, key, TILE: tl.constexpr):
    """Return the float64 mass of the weights whose bits are above `key`, of what `floor` leaves of `scores
    [count]`.
    """
    mass = tl.zeros([], tl.float64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < count
        x = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
        weight, left = weighed(x, inside, highest, temperature, floor)
        heavier = left & (weight.to(tl.int32, bitcast=True) > key)
        mass += tl.sum(tl.where(heavier, weight, 0.0).to(tl.float64), axis=0)
    return mass
