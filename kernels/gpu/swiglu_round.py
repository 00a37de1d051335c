"""Gated activations whose rows are rounded to FP8 or int8 in the same launch.

The numbers are those of swiglu.py and then round_rows.py, to the bit. A scale of a whole row wants its
largest number, so that one program computes the row; groups of 128 and fixed scales are dealt to several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two
from kernels.gpu.round_rows import room_for_rounded, round_groups
from kernels.gpu.swiglu import ACTIVATIONS, gated
from kernels.scaled_matrix import PEAK, SQUARE

_WIDTH = 2048
"""Numbers that a program computes where a row is dealt to several."""


@triton.jit
def _swiglu_round(
    gate_up, out, scales, static, columns, groups, limit, scale_stride, group_stride,
    ACTIVATION: tl.constexpr, STATIC: tl.constexpr, PEAK_OF: tl.constexpr, BY_HAND: tl.constexpr,
    COUNT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gate COUNT groups of GROUP columns of one row of `gate_up [rows, 2 * columns]` and round them.

    `out [rows, columns]`, `scales` float32 `[rows, groups]` of any strides, `static` float32 `[1]`; grid
    `[rows, ceil(columns / (COUNT * GROUP))]`.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    numbers = gated(gate, up, limit, ACTIVATION, gate_up.dtype.element_ty).to(tl.float32)
    rounded, scale = round_groups(numbers, static, PEAK_OF, STATIC, BY_HAND, out.dtype.element_ty)
    tl.store(out + row * columns + at, rounded, mask=inside)
    tl.store(scales + row * scale_stride + group * group_stride, scale, mask=group < groups)


def swiglu_round(
    gate_up: torch.Tensor,
    dtype: torch.dtype,
    *,
    activation: str = "silu",
    limit: float | None = None,
    squares: bool = False,
    static: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `round_rows(swiglu(gate_up), dtype)` of `gate_up [T, 2 * n]` in one launch: values and scales.

    `activation` and `limit` are those of `swiglu`. Raises ValueError for numbers that do not lie one after
    the other.
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out, scales = room_for_rounded(rows, columns, dtype, gate_up.device, squares=squares)
    if rows:
        width = power_of_two(columns, SQUARE)
        if squares or static is not None:
            width = min(_WIDTH, width)
        group = SQUARE if squares else width
        _swiglu_round[(rows, triton.cdiv(columns, width))](
            check_dense("gate_up", gate_up), out, scales, scales if static is None else static, columns,
            scales.shape[1], limit or 0.0, *scales.stride(), ACTIVATION=ACTIVATIONS[activation],
            STATIC=static is not None, PEAK_OF=PEAK[dtype], BY_HAND=INTERPRETED, COUNT=width // group,
            GROUP=group, num_warps=min(32, max(4, width // 512)),
        )  # fmt: skip
    return out, scales
