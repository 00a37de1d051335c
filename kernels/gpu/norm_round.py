"""Norms whose rows are rounded to FP8 or int8 in the same launch, for products that take such rows.

The numbers are those of rms_norm.py and then round_rows.py, to the bit: a norm is rounded to its own type
first. What is saved is a launch, and the way of the rows to memory and back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two
from kernels.gpu.rms_norm import normed_row, row_warps
from kernels.gpu.round_rows import room_for_rounded, round_groups
from kernels.scaled_matrix import PEAK, SQUARE


@triton.jit
def _norm_round(
    x, residual, weight, out, scales, static, columns, groups, eps, scale_stride, group_stride,
    ADD: tl.constexpr, STATIC: tl.constexpr, PEAK_OF: tl.constexpr, BY_HAND: tl.constexpr,
    COUNT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Normalise one row of `x [rows, columns]` by `weight [columns]` and round it, COUNT groups of GROUP.

    With ADD, `residual [rows, columns]` is added first and keeps the sum. `out [rows, columns]`, `scales`
    float32 `[rows, groups]` of any strides, `static` float32 `[1]`; grid `[rows]`.
    """
    WIDTH: tl.constexpr = COUNT * GROUP
    row = tl.program_id(0).to(tl.int64)
    normed = normed_row(
        x + row * columns, residual + row * columns, weight, columns, eps, ADD, WIDTH, x.dtype.element_ty
    )
    numbers = tl.reshape(normed.to(tl.float32), [COUNT, GROUP])
    rounded, scale = round_groups(numbers, static, PEAK_OF, STATIC, BY_HAND, out.dtype.element_ty)
    at = tl.arange(0, COUNT)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out + row * columns + at, rounded, mask=at < columns)
    group = tl.arange(0, COUNT)
    tl.store(scales + row * scale_stride + group * group_stride, scale, mask=group < groups)


def norm_round(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    squares: bool = False,
    static: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `round_rows(rms_norm(x, weight, eps), dtype)` of `x [T, n]` in one launch: values and scales.

    With `residual [T, n]` it is `add_rms_norm`, which changes the residual. Raises ValueError for numbers
    that do not lie one after the other.
    """
    rows, columns = x.shape
    out, scales = room_for_rounded(rows, columns, dtype, x.device, squares=squares)
    if rows:
        width = power_of_two(columns, SQUARE if squares else 1)
        group = SQUARE if squares else width
        _norm_round[(rows,)](
            check_dense("x", x), x if residual is None else check_dense("residual", residual), weight, out,
            scales, scales if static is None else static, columns, scales.shape[1], eps, *scales.stride(),
            ADD=residual is not None, STATIC=static is not None, PEAK_OF=PEAK[dtype], BY_HAND=INTERPRETED,
            COUNT=width // group, GROUP=group, num_warps=row_warps(width),
        )  # fmt: skip
    return out, scales
