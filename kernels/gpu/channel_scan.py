"""The selective scan of Mamba, row after row, a program some channels of one sequence.

The meaning is diptych/engine/backends/torch/recurrent (selective_scan.py, mamba.py), in float32. Decays differ
between the numbers of a channel, so that no product of rows replaces the steps. Loads of AHEAD rows do not
wait for the states, and so are on their way together. A row has the same bits however a text is cut, and
whatever its neighbours are; one token each of several sequences is the same kernel with pieces of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, power_of_two
from kernels.gpu.state_pages import in_units, load_tile, silu, softplus, store_tile, table_width
from kernels.recurrence import PieceRows, RowPages, ScanRule, StatePages

_CHANNELS = 32
"""Channels of a program, one a thread."""
_AHEAD = 8


@triton.jit(do_not_specialize=["table_width"])
def _scan(
    x, steps, b, c, gate, decay, step_bias, skip, out, firsts, offsets, memory, read, written, begin, stride,
    table_width, x_stride, steps_stride, b_stride, c_stride, gate_stride, out_stride, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, AHEAD: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Advance WIDTH of the CHANNELS channels of one sequence.

    `x` is float32 `[T, CHANNELS]`, `steps` and `gate` are of that shape, `b` and `c` are float32 `[T, M]`,
    `decay [CHANNELS, M]`, `step_bias` and `skip [CHANNELS]`. With SINGLE, row and piece number s are those of
    sequence s; else `firsts` and `offsets` are those of PieceRows. States are `[CHANNELS, M]`.
    """
    sequence = tl.program_id(1)
    channels = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = channels < CHANNELS
    lanes = tl.arange(0, M_PAD)
    in_state = lanes < M
    units = tl.arange(0, M_PAD // UNIT)
    if SINGLE:
        first, last = sequence, sequence + 1
    else:
        first, last = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    if first < last:
        a = tl.load(
            decay + channels[:, None] * M + lanes[None, :], mask=inside[:, None] & in_state[None, :], other=0.0
        )
        bias = tl.load(step_bias + channels, mask=inside, other=0.0)
        kept = tl.load(skip + channels, mask=inside, other=0.0)
        state = load_tile(
            memory, read + sequence * table_width, begin, channels, inside, units, units < M // UNIT,
            M // UNIT, stride, BLOCK_UNITS, UNIT, WIDTH, M_PAD,
        )  # fmt: skip
        for piece in range(first, last):
            if SINGLE:
                start, end = piece, piece + 1
            else:
                start, end = tl.load(offsets + piece), tl.load(offsets + piece + 1)
            for begun in range(start, end, AHEAD):
                for ahead in tl.static_range(AHEAD):
                    row = (channels - channels + begun + ahead).to(tl.int64)
                    of_row = (lanes - lanes + begun + ahead).to(tl.int64)
                    here = inside & (row < end)
                    of = in_state & (of_row < end)
                    value = tl.load(x + row * x_stride + channels, mask=here, other=0.0)
                    raw = tl.load(steps + row * steps_stride + channels, mask=here, other=0.0).to(tl.float32)
                    step = tl.where(here, softplus(raw + bias), 0.0)
                    b_row = tl.load(b + of_row * b_stride + lanes, mask=of, other=0.0)
                    c_row = tl.load(c + of_row * c_stride + lanes, mask=of, other=0.0)
                    opened = tl.load(gate + row * gate_stride + channels, mask=here, other=0.0).to(tl.float32)
                    # A row behind the end makes a step of zero, which changes nothing.
                    state = state * tl.exp(step[:, None] * a) + (step * value)[:, None] * b_row[None, :]
                    answer = tl.sum(state * c_row[None, :], axis=1) + value * kept
                    place = out + row * out_stride + channels
                    tl.store(place, (answer * silu(opened)).to(out.dtype.element_ty), mask=here)
            if end > start:
                store_tile(
                    state, memory, written + piece * table_width, begin, channels, inside, units,
                    units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, WIDTH, M_PAD,
                )  # fmt: skip


def channel_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rule: ScanRule,
    pages: StatePages,
    rows: RowPages | PieceRows,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance sequences by their tokens, one each or pieces, and return gated outputs in `out [T, width]`.

    `x` is float32 `[T, width]`, behind the convolution and its activation; `steps [T, width]` are without
    their bias; `b` and `c` are float32 `[T, state]`; `gate [T, width]`. Rows of all may lie apart.
    """
    single = isinstance(rows, RowPages)
    sequences = len(rows.read)
    if sequences == 0 or len(x) == 0:
        return out
    if not single:
        assert isinstance(rows, PieceRows)
    firsts, offsets = (rows.read, rows.read) if isinstance(rows, RowPages) else (rows.firsts, rows.offsets)
    units = in_units(pages, rule.state)
    width = power_of_two(rule.width) if INTERPRETED else _CHANNELS
    _scan[(triton.cdiv(rule.width, width), sequences)](
        x, steps, b, c, gate, rule.a, rule.step_bias, rule.skip, out, firsts, offsets, pages.memory,
        rows.read, rows.written, units.pop("begin"), units.pop("stride"),
        table_width(rows.read, rows.written), *(one.stride(0) for one in (x, steps, b, c, gate, out)),
        CHANNELS=rule.width, WIDTH=width, M=rule.state, M_PAD=power_of_two(rule.state, 4),
        AHEAD=1 if single else _AHEAD, SINGLE=single, **units, num_warps=1,
    )  # fmt: skip
    return out
