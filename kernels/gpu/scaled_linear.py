"""Products of rows and matrices that are both FP8 or int8 (kernels/scaled_matrix.py).

FP8 numbers are multiplied as float16, which has all of them: Hopper's own sums of FP8 keep fewer bits than
float32. That costs no time where rows are few and a step is the reading of the weights; of many rows the
library's product is twice as fast, where there is one (products/scaled_mm.py). A matrix has one tile for few
rows and one for many, so that a row has the same bits whatever stands beside it; sums of int8 are exact in
every tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, multiprocessors
from kernels.gpu.product_tiles import Tile, product_tile
from kernels.scaled_matrix import INT8, ScaledMatrix

FEW_ROWS = 16
MANY_ROWS = 64
_LARGE = 128


def choose_tile(weight: ScaledMatrix, rows: int, programs: int) -> Tile:
    """Return the tile in which `weight` multiplies `rows` rows on its card, which runs `programs` at once.

    Large tiles of int8 are for products that give every multiprocessor one.
    """
    whole = weight.values.dtype == INT8
    if rows <= FEW_ROWS:
        product = "int8 or squares, few rows" if whole or weight.squares else "FP8, few rows"
    elif not whole:
        product = "FP8, many rows"
    else:
        large = triton.cdiv(rows, _LARGE) * triton.cdiv(weight.shape[0], _LARGE)
        product = f"int8, {'many' if rows >= _LARGE and large >= programs else 'some'} rows"
    return product_tile(weight.values.device, product)


@triton.jit(do_not_specialize=["count"])
def _scaled_linear(
    x, x_scales, values, scales, bias, out, count, rows, stride, scale_stride, group_stride,
    K: tl.constexpr, BK: tl.constexpr, SQUARES: tl.constexpr, WHOLE: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows, BK of the depth at a time.

    `x [count, K]`, `x_scales` float32 `[count, groups]` of any strides, `values [rows, K]`, `scales` float32,
    `bias [rows]`, `out [count, rows]` whose rows begin `stride` numbers apart; grid `[ceil(rows / BN),
    ceil(count / ROWS)]`. With SQUARES BK is a square's columns.
    """
    GROUPS: tl.constexpr = (K + BK - 1) // BK
    SUM: tl.constexpr = tl.int32 if WHOLE else tl.float32
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(lane, rows - 1)
    input = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = input < count
    k = tl.arange(0, BK)
    w_place = values + row.to(tl.int64)[:, None] * K + k[None, :]
    x_place = x + input.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BN, ROWS], SUM)
    for start in range(0, K, BK):
        inside = k < K - start
        weight = tl.load(w_place + start, mask=inside[None, :], other=0.0)
        columns = tl.load(x_place + start, mask=real[None, :] & inside[:, None], other=0.0)
        if WHOLE:
            acc = tl.dot(weight, columns, acc, out_dtype=tl.int32)
        elif SQUARES:
            part = tl.dot(weight.to(tl.float16), columns.to(tl.float16))
            of_row = tl.load(scales + (row // BK) * GROUPS + start // BK)
            scale_place = x_scales + input.to(tl.int64) * scale_stride + (start // BK) * group_stride
            of_input = tl.load(scale_place, mask=real, other=0.0)
            acc += part * of_row[:, None] * of_input[None, :]
        else:
            acc = tl.dot(weight.to(tl.float16), columns.to(tl.float16), acc)
    if SQUARES:
        result = acc
    else:
        of_input = tl.load(x_scales + input * scale_stride, mask=real, other=0.0)
        result = acc.to(tl.float32) * of_input[None, :] * tl.load(scales + row)[:, None]
    if BIASED:
        result += tl.load(bias + row).to(tl.float32)[:, None]
    target = out + input.to(tl.int64)[None, :] * stride + lane[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=real[None, :] & (lane < rows)[:, None])


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: ScaledMatrix,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows `x [T, columns]`, rounded by `round_rows`, with the transpose of `weight` and add `bias`.

    Sums are rounded once, into `out [T, rows]`, which may be columns of a wider tensor. Raises ValueError for
    rows of another width, TypeError for another format.
    """
    rows, columns = weight.shape
    if x.dtype != weight.values.dtype:
        raise TypeError(f"rows of {x.dtype} times a matrix of {weight.values.dtype}")
    if x.shape[1] != columns or out.stride(1) != 1:
        raise ValueError(f"rows of {x.shape[1]} numbers times weights of {columns}")
    if len(x) == 0:
        return out
    tiles = choose_tile(weight, len(x), multiprocessors(x.device))
    _scaled_linear[(triton.cdiv(rows, tiles["BN"]), triton.cdiv(len(x), tiles["ROWS"]))](
        check_dense("x", x), x_scales, check_dense("values", weight.values),
        check_dense("scales", weight.scales), weight.scales if bias is None else bias, out, len(x), rows,
        out.stride(0), *x_scales.stride(), K=columns, SQUARES=weight.squares, WHOLE=x.dtype == INT8,
        BIASED=bias is not None, **tiles,
    )  # fmt: skip
    return out
