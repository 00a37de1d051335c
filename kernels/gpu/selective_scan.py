"""The selective scan of Mamba, row after row, a program some channels of one sequence.

The meaning is diptych/engine/backends/torch/recurrent (selective_scan.py, mamba.py), in float32. Decays
differ between the numbers of a channel, so that no product of rows replaces the steps. Loads of AHEAD rows do
not wait for the states, and so are on their way together. A row has the same bits however a text is cut, and
whatever its neighbours are; one token each of several sequences is the same kernel with cuts of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, power_of_two
from kernels.gpu.state_tiles import in_cuts, in_pages, load_tile, silu, softplus, store_tile
from kernels.recurrence import ScanRule
from kernels.state_pages import StateRuns

_CHANNELS = 32
"""Channels of a program, one a thread."""
_AHEAD = 8


@triton.jit(do_not_specialize=["offsets", "cuts", "ends", "read", "written", "starts", "page_blocks"])
def _scan(
    x, steps, b, c, gate, decay, step_bias, skip, out, offsets, cuts, ends, memory, base, read, written,
    starts, live, begin, stride, page_blocks, x_stride, steps_stride, b_stride, c_stride, gate_stride,
    out_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr,
    AHEAD: tl.constexpr, SINGLE: tl.constexpr, BASED: tl.constexpr, BLOCK_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Advance WIDTH of the CHANNELS channels of one sequence.

    `x` is float32 `[T, CHANNELS]`, `steps` and `gate` are of that shape, `b` and `c` are float32 `[T, M]`,
    `decay [CHANNELS, M]`, `step_bias` and `skip [CHANNELS]`. With SINGLE, row and cut number s are those of
    sequence s; else `offsets`, `cuts` and `ends` are those of StateRuns. States are `[CHANNELS, M]` of pages,
    from `memory` to UNIT as `in_pages` has them.
    """
    sequence = tl.program_id(1)
    channels = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = channels < CHANNELS
    lanes = tl.arange(0, M_PAD)
    in_state = lanes < M
    if SINGLE:
        first, last, start, final = sequence, sequence + 1, sequence, sequence + 1
    else:
        first, last = tl.load(cuts + sequence), tl.load(cuts + sequence + 1)
        start, final = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    if tl.load(live + sequence) == 0:
        for begun in range(start, final):
            row = (channels - channels + begun).to(tl.int64)
            nothing = tl.zeros([WIDTH], out.dtype.element_ty)
            tl.store(out + row * out_stride + channels, nothing, mask=inside)
    else:
        if BASED:
            memory += tl.multiple_of(tl.load(base), UNIT)
        units = tl.arange(0, M_PAD // UNIT)
        a = tl.load(
            decay + channels[:, None] * M + lanes[None, :],
            mask=inside[:, None] & in_state[None, :],
            other=0.0,
        )
        bias = tl.load(step_bias + channels, mask=inside, other=0.0)
        kept = tl.load(skip + channels, mask=inside, other=0.0)
        state = load_tile(
            memory, read + sequence * page_blocks, tl.load(starts + sequence), begin, channels, inside, units,
            units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, WIDTH, M_PAD,
        )  # fmt: skip
        for cut in range(first, last):
            if SINGLE:
                end = final
            else:
                end = tl.load(ends + cut)
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
            start = end
            store_tile(
                state, memory, written + cut * page_blocks, begin, channels, inside, units,
                units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, WIDTH, M_PAD,
            )  # fmt: skip


def selective_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rule: ScanRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance the sequences of `runs` by their rows and return gated outputs in `out [T, width]`; zeros for
    sequences that are not computed.

    `x` is float32 `[T, width]`, behind the convolution and its activation; `steps [T, width]` are without
    their bias; `b` and `c` are float32 `[T, state]`; `gate [T, width]`. Rows of all may lie apart. States are
    `[width, state]` from float `first` of a page on, and are written behind each cut.
    """
    if len(x) == 0:
        return out
    single = runs.offsets is None
    rows_of = dict.fromkeys(("offsets", "cuts", "ends"), runs.live) if single else in_cuts(runs)
    width = power_of_two(rule.width) if INTERPRETED else _CHANNELS
    strides = {
        f"{name}_stride": one.stride(0)
        for name, one in (("x", x), ("steps", steps), ("b", b), ("c", c), ("gate", gate), ("out", out))
    }
    _scan[(triton.cdiv(rule.width, width), runs.sequences)](
        x, steps, b, c, gate, rule.a, rule.step_bias, rule.skip, out, **rows_of, **strides,
        CHANNELS=rule.width, WIDTH=width, M=rule.state, M_PAD=power_of_two(rule.state, 4),
        AHEAD=1 if single else _AHEAD, SINGLE=single, **in_pages(runs, first, rule.state), num_warps=1,
    )  # fmt: skip
    return out
