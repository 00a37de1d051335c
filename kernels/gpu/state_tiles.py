"""Places of recurrent states in the blocks of pages, for kernels that read and write them where they lie.

Floats are found in units of UNIT that lie in one block together, so that a thread's loads are as wide as the
card has them: a unit's block is looked up once. kernels/state_pages.py has the layout.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import triton
import triton.language as tl

from kernels.state_pages import StateRuns

_WIDEST = 4
"""Floats of a unit: 16 bytes, the widest load of a thread."""


@triton.jit
def unit_places(pages, numbers, mask, stride, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the places in memory of units `numbers [...]` of the page whose blocks are at `pages`, int64,
    and which of those in `mask [...]` there are.

    Blocks lie `stride` units apart. Each is looked at: those of a sequence that is aborted become NO_PAGE one
    by one while a kernel runs.
    """
    block = tl.load(pages + numbers // BLOCK_UNITS, mask=mask, other=-1)
    return (block.to(tl.int64) * stride + numbers % BLOCK_UNITS) * UNIT, mask & (block >= 0)


@triton.jit
def load_tile(
    memory, pages, there, begin, rows, row_mask, columns, column_mask, row_units, stride,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the tile float32 `[HEIGHT, WIDTH]` of a state that begins at unit `begin` of the page and has
    `row_units` units a row: its rows `rows [HEIGHT]` and units `columns [WIDTH / UNIT]`; zeros outside of the
    masks, and all where `there` is 0.
    """
    numbers = begin + rows[:, None] * row_units + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :] & (tl.zeros_like(numbers) + there > 0)
    places, mask = unit_places(pages, numbers, mask, stride, BLOCK_UNITS, UNIT)
    lanes = tl.arange(0, UNIT)
    found = tl.load(memory + places[:, :, None] + lanes[None, None, :], mask=mask[:, :, None], other=0.0)
    return tl.reshape(found, [HEIGHT, WIDTH])


@triton.jit
def store_tile(
    tile, memory, pages, begin, rows, row_mask, columns, column_mask, row_units, stride,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store what `load_tile` returns; nothing where there is no page, whose blocks are negative."""
    numbers = begin + rows[:, None] * row_units + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    places, mask = unit_places(pages, numbers, mask, stride, BLOCK_UNITS, UNIT)
    lanes = tl.arange(0, UNIT)
    units = tl.reshape(tile, [HEIGHT, WIDTH // UNIT, UNIT])
    tl.store(memory + places[:, :, None] + lanes[None, None, :], units, mask=mask[:, :, None])


def in_pages(runs: StateRuns, first: int, row_floats: int) -> dict[str, Any]:
    """Return the arguments of kernels by which they find states that begin at float `first` of a page, and
    whose rows have `row_floats` floats, and what a run is made of.
    """
    unit = gcd(_WIDEST, runs.block_floats, first, runs.pool.stride(0), row_floats)
    return {
        "memory": runs.pool,
        "base": runs.live if runs.base is None else runs.base,
        "read": runs.read,
        "written": runs.written,
        "starts": runs.starts,
        "live": runs.live,
        "begin": first // unit,
        "stride": runs.pool.stride(0) // unit,
        "page_blocks": runs.page_blocks,
        "BASED": runs.base is not None,
        "BLOCK_UNITS": runs.block_floats // unit,
        "UNIT": unit,
    }


def in_cuts(runs: StateRuns) -> dict[str, Any]:
    """Return the arguments of kernels by which they find the rows of a run of chunks."""
    assert runs.offsets is not None, "the run is of chunks"
    return {"offsets": runs.offsets, "cuts": runs.cuts, "ends": runs.ends}


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))` of float32 `x [...]`, to the last digits where that is small, too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + grown
    # What rounding took from `whole` is put back by the quotient (Kahan).
    small = whole - 1.0
    exact = tl.where(small == 0.0, grown, tl.log(whole) * (grown / tl.where(small == 0.0, 1.0, small)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def silu(x):
    """Return `x / (1 + exp(-x))` of float32 `x [...]`."""
    return x / (1.0 + tl.exp(-x))
