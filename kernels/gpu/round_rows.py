"""Rows rounded to FP8 or int8 with a scale of their own, of 128 numbers each, or a fixed one.

A card rounds to FP8 by its own instruction (PTX `cvt.rn.satfinite.e4m3x2.f32`: to the nearest, ties to even).
The interpreter cuts the last places off instead, so that there numbers are rounded before they are converted;
tests hold both against torch's conversion, at every number and every middle of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two
from kernels.scaled_matrix import PEAK, SQUARE

_GROUPS = 8
"""Groups of 128 numbers that one program rounds."""


@triton.jit
def to_e4m3(x):
    """Round float32 `x`, at most 448, to a number of E4M3, ties to even; the result is still float32."""
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
def round_to(scaled, PEAK_OF: tl.constexpr, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Return float32 `scaled` rounded to TYPE, int8 or FP8, of which PEAK_OF is the largest number.

    BY_HAND rounds to FP8 before the conversion.
    """
    scaled = tl.minimum(tl.maximum(scaled, -PEAK_OF), PEAK_OF)
    if tl.int8 == TYPE:
        scaled = _to_whole(scaled)
    elif BY_HAND:
        scaled = to_e4m3(scaled)
    return scaled.to(TYPE)


@triton.jit
def round_groups(
    numbers, static, PEAK_OF: tl.constexpr, STATIC: tl.constexpr, BY_HAND: tl.constexpr, TYPE: tl.constexpr
):
    """Return float32 `numbers [groups, width]` rounded to TYPE, and the scale of each group, `[groups]`.

    STATIC: the number at `static` is the scale of all. See `round_to` for PEAK_OF and BY_HAND.
    """
    if STATIC:
        scale = tl.broadcast_to(tl.load(static), [numbers.shape[0]])
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), axis=1), 1e-12), PEAK_OF)
    scaled = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
    return round_to(scaled, PEAK_OF, TYPE, BY_HAND), scale


@triton.jit
def _round_rows(
    x, out, scales, static, columns, groups, scale_stride, group_stride, PEAK_OF: tl.constexpr,
    STATIC: tl.constexpr, BY_HAND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Round COUNT groups of GROUP numbers of one row; grid `[rows, ceil(groups / COUNT)]`.

    `x` and `out [rows, columns]`, `scales` float32 `[rows, groups]` of any strides, `static` float32 `[1]`;
    WIDTH is a power of two of at least GROUP.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    lane = tl.arange(0, WIDTH)[None, :]
    at = group[:, None] * GROUP + lane
    inside = (lane < GROUP) & (at < columns)
    numbers = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = round_groups(numbers, static, PEAK_OF, STATIC, BY_HAND, out.dtype.element_ty)
    tl.store(out + row * columns + at, rounded, mask=inside)
    tl.store(scales + row * scale_stride + group * group_stride, scale, mask=group < groups)


def round_rows(
    x: torch.Tensor, dtype: torch.dtype, *, squares: bool = False, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x [T, columns]` rounded to FP8 or int8, and float32 scales `[T, groups]`.

    Scales of `squares` lie group after group, T padded to a multiple of four: the library's layout
    (products/scaled_mm.py). See kernels/scaled_matrix.py for their meaning; a card older than 8.9 has no FP8.
    """
    rows, columns = x.shape
    out, scales = room_for_rounded(rows, columns, dtype, x.device, squares=squares)
    group, groups = SQUARE if squares else columns, scales.shape[1]
    if rows:
        width = power_of_two(group)
        count = min(_GROUPS, power_of_two(groups))
        _round_rows[(rows, triton.cdiv(groups, count))](
            check_dense("x", x), out, scales, scales if static is None else static, columns, groups,
            *scales.stride(), PEAK_OF=PEAK[dtype], STATIC=static is not None, BY_HAND=INTERPRETED,
            GROUP=group, WIDTH=width, COUNT=count,
            # 16 bytes of bfloat16 a thread, up to a whole block of threads.
            num_warps=min(32, max(1, count * width // 256)),
        )  # fmt: skip
    return out, scales


def room_for_rounded(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for rounded numbers `[rows, columns]` and their scales, laid out as `round_rows` says."""
    groups = triton.cdiv(columns, SQUARE) if squares else 1
    strides = (1, triton.cdiv(rows, 4) * 4) if squares else (groups, 1)
    values = torch.empty((rows, columns), dtype=dtype, device=device)
    return values, torch.empty_strided((rows, groups), strides, dtype=torch.float32, device=device)
