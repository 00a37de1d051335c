"""Rows rounded to FP8 or int8 with a scale of their own, of 128 numbers each, or a fixed one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two
from kernels.scaled_matrix import INT8, PEAK, SQUARE


@triton.jit
def _to_e4m3(x):
    """Round float32 `x`, at most 448, to a number of E4M3, ties to even; the result is still float32.

    In whole numbers, so that every card and the interpreter round alike.
    """
    bits = x.to(tl.int32, bitcast=True)
    even = (bits >> 20) & 1
    large = ((bits + 0x7FFFF + even) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2**-6 numbers lie 2**-9 apart: as the last places of numbers about 2**14.
    small = tl.where(x < 0.0, x - 16384.0, x + 16384.0)
    small = tl.where(x < 0.0, small + 16384.0, small - 16384.0)
    return tl.where(tl.abs(x) < 0.015625, small, large)


@triton.jit
def _to_whole(x):
    """Round float32 `x`, at most 127, to the nearest whole number, ties to even."""
    return tl.where(x < 0.0, (x - 8388608.0) + 8388608.0, (x + 8388608.0) - 8388608.0)


@triton.jit
def _round_rows(
    x, out, scales, static, columns, groups, PEAK_OF: tl.constexpr, FLOATS: tl.constexpr,
    STATIC: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round one group of GROUP numbers of one row; grid `[rows, groups]`.

    `x` and `out [rows, columns]`, `scales` float32 `[rows, groups]`, `static` float32 `[1]`; WIDTH is a power
    of two of at least GROUP.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    at = group * GROUP + lane
    inside = (lane < GROUP) & (at < columns)
    numbers = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers)), 1e-12), PEAK_OF)
    scaled = tl.div_rn(numbers, tl.broadcast_to(scale, [WIDTH]))
    scaled = tl.minimum(tl.maximum(scaled, -PEAK_OF), PEAK_OF)
    if FLOATS:
        rounded = _to_e4m3(scaled)
    else:
        rounded = _to_whole(scaled)
    tl.store(out + row * columns + at, rounded.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + group, scale)


def round_rows(
    x: torch.Tensor, dtype: torch.dtype, *, squares: bool = False, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x [T, columns]` rounded to FP8 or int8, and float32 scales `[T, groups]`.

    See kernels/scaled_matrix.py; a card older than 8.9 has no FP8.
    """
    rows, columns = x.shape
    group = SQUARE if squares else columns
    groups = triton.cdiv(columns, group)
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        width = power_of_two(group)
        _round_rows[(rows, groups)](
            check_dense("x", x), out, scales, scales if static is None else static, columns, groups,
            PEAK_OF=PEAK[dtype], FLOATS=dtype != INT8, STATIC=static is not None, GROUP=group, WIDTH=width,
            num_warps=1 if width <= SQUARE else 8,
        )  # fmt: skip
    return out, scales
