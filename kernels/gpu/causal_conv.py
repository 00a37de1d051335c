"""Causal convolution of each channel over a token and the few before it, whose inputs are a sequence's state.

The meaning is diptych/engine/backends/torch/recurrent/causal_conv.py: taps are added oldest first, so that a
row has the same bits however a text is cut and whatever its neighbours are.

A decode row is one program a block of channels, which reads the row's state, and writes the next. Of chunks a
program has some rows and channels; states are written by a launch behind it, for a page may be written that
is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, power_of_two
from kernels.gpu.state_pages import in_units, silu, table_width, unit_places, where_page
from kernels.recurrence import PieceRows, RowPages, StatePages

_CHANNELS = 256
"""Channels of a program."""
_ROWS = 16
"""Rows of a chunk's program."""


@triton.jit
def _input(x, at, mask, before, BEFORE: tl.constexpr):
    """Return the inputs at `x + at [...]`, float32; with BEFORE times those `before` numbers on, rounded."""
    read = tl.load(x + at, mask=mask, other=0.0)
    if BEFORE:
        read = (read.to(tl.float32) * tl.load(x + at + before, mask=mask, other=0.0).to(tl.float32)).to(
            read.dtype
        )
    return read.to(tl.float32)


@triton.jit
def _store(out, at, value, x, x_at, mask, after, SILU: tl.constexpr, AFTER: tl.constexpr):
    """Store sums `value [...]` at `out + at`, with their activation; with AFTER times the numbers that lie
    `after` numbers from `x + x_at`.
    """
    if SILU:
        value = silu(value)
    if AFTER:
        TYPE: tl.constexpr = out.dtype.element_ty
        gate = tl.load(x + x_at + after, mask=mask, other=0.0).to(tl.float32)
        value = gate * value.to(TYPE).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_width"])
def _step(
    x, weight, bias, out, memory, read, written, begin, stride, table_width, x_stride, out_stride, channels,
    before, after, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Convolve WIDTH channels of one row of `x [B, channels]` into `out [B, channels]`.

    `weight` is float32 `[channels, TAPS]`, `bias [channels]`; states are `[TAPS - 1, channels]` of pages in
    the tables `read` and `written [B, table_width]` (state_pages.py).
    """
    row = tl.program_id(1)
    units = tl.program_id(0) * (WIDTH // UNIT) + tl.arange(0, WIDTH // UNIT)
    row_units = channels // UNIT
    of_unit = units < row_units
    at = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    mask = at < channels
    pages_read, pages_written = read + row * table_width, written + row * table_width
    before_it, kept = where_page(pages_read, of_unit), where_page(pages_written, of_unit)
    lanes = tl.arange(0, UNIT)[None, :]
    x_at = row.to(tl.int64) * x_stride + at
    last = _input(x, x_at, mask, before, BEFORE)
    total = tl.zeros([WIDTH // UNIT, UNIT], tl.float32)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            places = unit_places(
                pages_read, begin + tap * row_units + units, before_it, stride, BLOCK_UNITS, UNIT
            )
            seen = tl.load(memory + places[:, None] + lanes, mask=before_it[:, None], other=0.0)
        else:
            seen = last
        total += seen * tl.load(weight + at * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            # The oldest is dropped; the others move up by one.
            places = unit_places(
                pages_written, begin + (tap - 1) * row_units + units, kept, stride, BLOCK_UNITS, UNIT
            )
            tl.store(memory + places[:, None] + lanes, seen, mask=kept[:, None])
    if BIAS:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    _store(out, row.to(tl.int64) * out_stride + at, total, x, x_at, mask, after, SILU, AFTER)


@triton.jit(do_not_specialize=["table_width"])
def _pieces(
    x, weight, bias, out, memory, read, firsts, offsets, begin, stride, table_width, x_stride, out_stride,
    channels, before, after, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Convolve WIDTH channels of ROWS rows of one sequence; arguments as those of `_step`, with `firsts` and
    `offsets` of PieceRows, and one row of `read` a sequence.
    """
    sequence = tl.program_id(2)
    start = tl.load(offsets + tl.load(firsts + sequence))
    end = tl.load(offsets + tl.load(firsts + sequence + 1))
    if start + tl.program_id(1) * ROWS < end:
        rows = start + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        mask = (rows < end)[:, None] & (at < channels)[None, :]
        pages = read + sequence * table_width
        there = (tl.load(pages) >= 0) & (tl.program_id(1) * ROWS < TAPS)
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for tap in tl.static_range(TAPS):
            source = rows - (TAPS - 1) + tap
            here = mask & (source >= start)[:, None]
            seen = _input(x, source.to(tl.int64)[:, None] * x_stride + at[None, :], here, before, BEFORE)
            if there:
                # Rows before the sequence's first are in its state.
                older = mask & (source < start)[:, None]
                number = (source - start + TAPS - 1)[:, None] * channels + at[None, :]
                places = unit_places(pages, begin + number // UNIT, older, stride, BLOCK_UNITS, UNIT)
                seen += tl.load(memory + places + number % UNIT, mask=older, other=0.0)
            total += seen * tl.load(weight + at * TAPS + tap, mask=at < channels, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + at, mask=at < channels, other=0.0).to(tl.float32)[None, :]
        x_at = rows.to(tl.int64)[:, None] * x_stride + at[None, :]
        out_at = rows.to(tl.int64)[:, None] * out_stride + at[None, :]
        _store(out, out_at, total, x, x_at, mask, after, SILU, AFTER)


@triton.jit(do_not_specialize=["table_width"])
def _keep(
    x, memory, read, firsts, offsets, written, begin, stride, table_width, x_stride, channels, before,
    TAPS: tl.constexpr, TAPS_PAD: tl.constexpr, BEFORE: tl.constexpr, BLOCK_UNITS: tl.constexpr,
    UNIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the states of WIDTH channels behind each piece of one sequence; arguments as those of `_pieces`."""
    sequence = tl.program_id(1)
    first = tl.load(firsts + sequence)
    last = tl.load(firsts + sequence + 1)
    if first < last:
        start = tl.load(offsets + first)
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        inside = at < channels
        taps = tl.arange(0, TAPS_PAD)
        pages = read + sequence * table_width
        old_mask = where_page(pages, (taps < TAPS - 1)[:, None] & inside[None, :])
        number = taps[:, None] * channels + at[None, :]
        places = unit_places(pages, begin + number // UNIT, old_mask, stride, BLOCK_UNITS, UNIT)
        # Read before anything is written: one of the pages may be this one.
        old = tl.load(memory + places + number % UNIT, mask=old_mask, other=0.0)
        for piece in range(first, last):
            end = tl.load(offsets + piece + 1)
            target = written + piece * table_width
            kept = where_page(target, inside & (at - at + end > tl.load(offsets + piece)))
            for tap in tl.static_range(TAPS - 1):
                source = end - (TAPS - 1) + tap
                here = inside & (at - at + source >= start)
                value = _input(x, source.to(tl.int64) * x_stride + at, here, before, BEFORE)
                older = tl.where((taps == source - start + TAPS - 1)[:, None], old, 0.0)
                value += tl.sum(older, axis=0)
                number = tap * channels + at
                places = unit_places(target, begin + number // UNIT, kept, stride, BLOCK_UNITS, UNIT)
                tl.store(memory + places + number % UNIT, value, mask=kept)


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: StatePages,
    rows: RowPages,
    *,
    silu: bool,
    out: torch.Tensor,
    before: int | None = None,
    after: int | None = None,
) -> torch.Tensor:
    """Convolve one token each of B sequences, `x [B, C]` (rows may lie apart), by float32 `weight [C, K]` and
    `bias [C]` into `out [B, C]`, and write the states `[K - 1, C]` behind them.

    With `silu` that is applied to sums. With `before`, inputs are products with the numbers that lie so many
    behind them; with `after`, outputs are products with those that lie so many behind the inputs.
    """
    count, channels = out.shape
    if count == 0:
        return out
    units = in_units(pages, channels)
    width = _width(channels)
    _step[(triton.cdiv(channels, width), count)](
        x, weight, x if bias is None else bias, out, pages.memory, rows.read, rows.written,
        units.pop("begin"), units.pop("stride"), table_width(rows.read, rows.written), x.stride(0), out.stride(0), channels, before or 0, after or 0, TAPS=weight.shape[1],
        BIAS=bias is not None, SILU=silu, BEFORE=before is not None, AFTER=after is not None, **units,
        WIDTH=width,
    )  # fmt: skip
    return out


def conv_pieces(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: StatePages,
    rows: PieceRows,
    *,
    silu: bool,
    out: torch.Tensor,
    before: int | None = None,
    after: int | None = None,
) -> torch.Tensor:
    """Convolve the tokens of several sequences, `x [T, C]`, into `out [T, C]`, and write the states behind
    their pieces; other arguments as those of `conv_step`. Rows that belong to no piece are left as they are.
    """
    sequences, channels, taps = len(rows.read), out.shape[1], weight.shape[1]
    if sequences == 0 or rows.max_rows == 0:
        return out
    units = in_units(pages, channels)
    begin, stride, width = units.pop("begin"), units.pop("stride"), _width(channels)
    found = (pages.memory, rows.read, rows.firsts, rows.offsets)
    programs, table = triton.cdiv(channels, width), table_width(rows.read, rows.written)
    _pieces[(programs, triton.cdiv(rows.max_rows, _ROWS), sequences)](
        x, weight, x if bias is None else bias, out, *found, begin, stride, table, x.stride(0),
        out.stride(0), channels, before or 0, after or 0, TAPS=taps, BIAS=bias is not None, SILU=silu,
        BEFORE=before is not None, AFTER=after is not None, **units, ROWS=_ROWS, WIDTH=width,
    )  # fmt: skip
    if taps > 1:
        _keep[(programs, sequences)](
            x, *found, rows.written, begin, stride, table, x.stride(0), channels, before or 0, TAPS=taps, TAPS_PAD=power_of_two(taps - 1), BEFORE=before is not None,
            **units, WIDTH=width,
        )  # fmt: skip
    return out


def _width(channels: int) -> int:
    return power_of_two(channels) if INTERPRETED else min(_CHANNELS, power_of_two(channels, 32))
