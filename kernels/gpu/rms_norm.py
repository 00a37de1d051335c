"""Root mean square normalisation, alone and with the residual's addition, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two


@triton.jit
def normed_row(x, residual, weight, columns, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Return the norm of the row that begins at `x`, `[WIDTH]` of TYPE: zeros behind its `columns` numbers.

    With ADD the row is added to the one at `residual` first, which keeps the sum.
    """
    at = tl.arange(0, WIDTH)
    wide = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    return normed_numbers(wide, residual, weight, columns, eps, ADD, WIDTH, TYPE)


@triton.jit
def normed_numbers(
    wide, residual, weight, columns, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr
):
    """Return what `normed_row` does, of the float32 numbers `wide [WIDTH]` in place of those of a row."""
    at = tl.arange(0, WIDTH)
    inside = at < columns
    if ADD:
        # Rounded as it is stored: the norm is of what later layers will read.
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        summed = (wide + before).to(residual.dtype.element_ty)
        tl.store(residual + at, summed, mask=inside)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    normed = wide * scale
    if weight.dtype.element_ty != tl.float32:
        # A weight of the numbers' own type multiplies what is rounded already (kernels/rms_norm.py).
        normed = normed.to(TYPE).to(tl.float32)
    return (normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(TYPE)


@triton.jit
def _rms_norm(
    x, residual, weight, out, columns, x_stride, out_stride, eps, ADD: tl.constexpr, WIDTH: tl.constexpr
):
    """Normalise one row of `x [rows, columns]` by `weight [columns]` into `out`.

    Rows of `x` and `out` lie `x_stride` and `out_stride` numbers apart. With ADD, `residual [rows, columns]`
    is added first and keeps the sum. WIDTH is columns, padded.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    normed = normed_row(
        x + row * x_stride, residual + row * columns, weight, columns, eps, ADD, WIDTH, out.dtype.element_ty
    )
    tl.store(out + row * out_stride + at, normed, mask=at < columns)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise `x [..., n]` over n and multiply by `weight [n]`; `x` may be `out`.

    Both are dense, or matrices whose rows may lie apart. The meaning is kernels/rms_norm.py.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `x [..., n]` to `residual [..., n]` in place and return the norm of the sum times `weight [n]`.

    One pass over memory.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, check_dense("residual", residual), weight, eps, out)
    return out


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    columns = x.shape[-1]
    rows = x.numel() // columns
    if rows == 0:
        return
    strides = _row_stride("x", x), _row_stride("out", out)
    width = power_of_two(columns)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        columns,
        *strides,
        eps,
        ADD=residual is not None,
        WIDTH=width,
        num_warps=row_warps(width),
    )


def row_warps(width: int) -> int:
    """Return the warps of a program that holds a row of `width` numbers: 16 bytes of bfloat16 a thread and
    turn. They set the order of a norm's sum.
    """
    return min(16, max(1, width // 512))


def _row_stride(name: str, tensor: torch.Tensor) -> int:
    """Return the numbers from a row's beginning to the next one's. Raises ValueError, with `name`."""
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor.stride(0)
    return check_dense(name, tensor).shape[-1]
