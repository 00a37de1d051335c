"""The sum of a model's parts on the GPU, alone and with the residual's addition and norm; a program a row.

The meaning is kernels/sum_parts.py, then add_rms_norm of rms_norm.py, to the bit. One launch reads what was
gathered from the ranks, however many parts there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two
from kernels.gpu.rms_norm import normed_numbers, row_warps


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(
    parts, residual, weight, out, rows, columns, eps,
    COUNT: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add one row of COUNT parts, `parts [COUNT, rows, columns]`.

    With NORM the sum is added to `residual [rows, columns]`, which keeps it, and `out [rows, columns]` is its
    norm times `weight [columns]`; else `out` is the sum. WIDTH is columns, padded; grid `[rows]`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < columns
    total = tl.load(parts + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    for part in range(1, COUNT):
        # A multiple of columns: so the compiler sees that rows begin where wide loads may.
        place = parts + (row + part * rows) * columns + at
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    result = total.to(parts.dtype.element_ty)
    if NORM:
        result = normed_numbers(
            result.to(tl.float32), residual + row * columns, weight, columns, eps, True, WIDTH,
            out.dtype.element_ty,
        )  # fmt: skip
    tl.store(out + row * columns + at, result, mask=inside)


def sum_parts(parts: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Add `parts [P, T, n]` in their order, in float32, and round the sum once: `[T, n]`.

    `out` may be one of the parts. Raises ValueError for numbers that do not lie one after the other.
    """
    out = torch.empty_like(parts[0]) if out is None else out
    _launch(parts, None, None, 0.0, out)
    return out


def sum_parts_rms_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the sum of `parts [P, T, n]` to `residual [T, n]` in place; return its norm times `weight [n]`.

    The bits are those of `add_rms_norm(sum_parts(parts), residual, weight, eps)`, `[T, n]`.
    """
    out = torch.empty_like(residual) if out is None else out
    _launch(parts, residual, weight, eps, out)
    return out


def _launch(
    parts: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    count, rows, columns = check_dense("parts", parts).shape
    if rows == 0:
        return
    width = power_of_two(columns)
    _sum_parts[(rows,)](
        parts, parts if residual is None else check_dense("residual", residual),
        parts if weight is None else weight, check_dense("out", out), rows, columns, eps,
        COUNT=count, NORM=weight is not None, WIDTH=width, num_warps=row_warps(width),
    )  # fmt: skip
