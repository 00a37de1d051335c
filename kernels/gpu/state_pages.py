"""Places of recurrent states in the blocks of pages, for kernels that read and write them where they lie.

Floats are found in units of UNIT that lie in one block together, so that a thread's loads are as wide as the
card has them: a unit's block is looked up once. `kernels/recurrence.py` has the layout.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.recurrence import StatePages

_WIDEST = 4
"""Floats of a unit: 16 bytes, the widest load of a thread."""


@triton.jit
def unit_places(pages, numbers, mask, stride, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the places in memory of units `numbers [...]` of the page whose blocks are at `pages`, int64.

    Blocks lie `stride` units apart; of units outside of `mask [...]` the place is one that exists.
    """
    block = tl.load(pages + numbers // BLOCK_UNITS, mask=mask, other=0)
    return (block.to(tl.int64) * stride + numbers % BLOCK_UNITS) * UNIT


@triton.jit
def where_page(pages, mask):
    """Return `mask [...]`, or nothing where there is no page at `pages`."""
    return mask & (tl.zeros(mask.shape, tl.int32) + tl.load(pages) >= 0)


@triton.jit
def load_tile(
    memory, pages, begin, rows, row_mask, columns, column_mask, row_units, stride, BLOCK_UNITS: tl.constexpr,
    UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the tile float32 `[HEIGHT, WIDTH]` of a state that begins at unit `begin` of the page and has
    `row_units` units a row: its rows `rows [HEIGHT]` and units `columns [WIDTH / UNIT]`; zeros outside of the
    masks, and all where there is no page.
    """
    numbers = begin + rows[:, None] * row_units + columns[None, :]
    mask = where_page(pages, row_mask[:, None] & column_mask[None, :])
    places = unit_places(pages, numbers, mask, stride, BLOCK_UNITS, UNIT)
    lanes = tl.arange(0, UNIT)
    found = tl.load(memory + places[:, :, None] + lanes[None, None, :], mask=mask[:, :, None], other=0.0)
    return tl.reshape(found, [HEIGHT, WIDTH])


@triton.jit
def store_tile(
    tile, memory, pages, begin, rows, row_mask, columns, column_mask, row_units, stride,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store what `load_tile` returns; nothing where there is no page."""
    numbers = begin + rows[:, None] * row_units + columns[None, :]
    mask = where_page(pages, row_mask[:, None] & column_mask[None, :])
    places = unit_places(pages, numbers, mask, stride, BLOCK_UNITS, UNIT)
    lanes = tl.arange(0, UNIT)
    units = tl.reshape(tile, [HEIGHT, WIDTH // UNIT, UNIT])
    tl.store(memory + places[:, :, None] + lanes[None, None, :], units, mask=mask[:, :, None])


def in_units(pages: StatePages, row_floats: int) -> dict[str, Any]:
    """Return the arguments of kernels by which they find states whose rows have `row_floats` floats."""
    memory = pages.memory
    if memory.dtype != torch.float32 or memory.stride(1) != 1:
        raise ValueError(f"states are float32 rows, not {memory.dtype} {tuple(memory.stride())}")
    unit = gcd(_WIDEST, pages.block_floats, pages.begin, memory.stride(0), row_floats)
    return {
        "begin": pages.begin // unit,
        "stride": memory.stride(0) // unit,
        "BLOCK_UNITS": pages.block_floats // unit,
        "UNIT": unit,
    }


def table_width(read: torch.Tensor, written: torch.Tensor) -> int:
    """Return the numbers from one row of the tables of pages to the next, int32 `[rows, n]` both. Raises
    ValueError for others.
    """
    for table in (read, written):
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
            raise ValueError(f"{table.dtype} {tuple(table.shape)} is no table of pages")
    if read.stride(0) != written.stride(0):
        raise ValueError("tables of pages read and written have rows of different lengths")
    return read.stride(0)


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
