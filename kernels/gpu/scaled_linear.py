"""Products of rows and matrices that are both FP8 or int8 (kernels/scaled_matrix.py).

FP8 numbers are multiplied as float16, which has all of them: Hopper's own sums of FP8 keep fewer bits than
float32. That costs no time where rows are few and a step is the reading of the weights; of many rows the
library's product is twice as fast, where there is one (products/scaled_mm.py). A matrix has one tile for few
rows and one for many, so that a row has the same bits whatever stands beside it; sums of int8 are exact in
every tile.

Few rows of FP8 may come as they are: weights become numbers of the rows' own type instead. It costs no bytes
of weights and spares the rounding of rows, a launch before the output product. By arithmetic for an H200 and
an 8B layer's 218 million weights: three instructions more for two numbers, 11 µs of 84 if nothing hid them;
rows of two bytes, which every program reads, are at most as many bytes as a tile's weights (BN 32), so that a
multiprocessor reads 436 MB in all as before; one launch of 2 µs less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, multiprocessors, operand_type
from kernels.gpu.package_tiles import Tile
from kernels.gpu.product_tiles import product_tile
from kernels.scaled_matrix import INT8, SQUARE, ScaledMatrix

FEW_ROWS = 16
MANY_ROWS = 64
_LARGE = 128
_WIDE = 32
"""Outputs of the tile of rows as they are: their bytes are those of its weights."""


def choose_tile(weight: ScaledMatrix, rows: int, programs: int, *, rounded: bool = True) -> Tile:
    """Return the tile in which `weight` multiplies `rows` rows on its card, which runs `programs` at once.

    Those that are not `rounded` are few, and read in wide tiles where every multiprocessor has two. Large
    tiles of int8 are for products that give every multiprocessor one.
    """
    whole = weight.values.dtype == INT8
    if not rounded:
        wide = weight.shape[0] >= 2 * _WIDE * programs
        product = f"FP8, few rows as they are, {'wide' if wide else 'narrow'}"
    elif rows <= FEW_ROWS:
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
    ROUNDED: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows, BK of the depth at a time.

    `x [count, K]`, ROUNDED with `x_scales` float32 `[count, groups]` of any strides, else multiplied as
    OPERAND, `values [rows, K]`, `scales` float32,
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
            part = tl.dot(weight.to(OPERAND), columns.to(OPERAND), input_precision="ieee")
            part *= tl.load(scales + (row // BK) * GROUPS + start // BK)[:, None]
            if ROUNDED:
                scale_place = x_scales + input.to(tl.int64) * scale_stride + (start // BK) * group_stride
                part *= tl.load(scale_place, mask=real, other=0.0)[None, :]
            acc += part
        else:
            acc = tl.dot(weight.to(OPERAND), columns.to(OPERAND), acc, input_precision="ieee")
    if SQUARES:
        result = acc
    else:
        result = acc.to(tl.float32)
        if ROUNDED:
            result *= tl.load(x_scales + input * scale_stride, mask=real, other=0.0)[None, :]
        result *= tl.load(scales + row)[:, None]
    if BIASED:
        result += tl.load(bias + row).to(tl.float32)[:, None]
    target = out + input.to(tl.int64)[None, :] * stride + lane[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=real[None, :] & (lane < rows)[:, None])


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: ScaledMatrix,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows `x [T, columns]`, rounded by `round_rows`, with the transpose of `weight` and add `bias`.

    Without `x_scales` up to FEW_ROWS rows in 16 or 32 bits are multiplied with FP8 as they are. Sums are
    rounded once, into `out [T, rows]`, which may be columns of a wider tensor. Raises ValueError for rows of
    another width or too many, TypeError for another format.
    """
    rows, columns = weight.shape
    rounded = x_scales is not None
    if x.dtype != weight.values.dtype and (rounded or weight.values.dtype == INT8):
        raise TypeError(f"rows of {x.dtype} times a matrix of {weight.values.dtype}")
    if not rounded and len(x) > FEW_ROWS:
        raise ValueError(f"{len(x)} rows as they are; {FEW_ROWS} at most")
    if x.shape[1] != columns or out.stride(1) != 1:
        raise ValueError(f"rows of {x.shape[1]} numbers times weights of {columns}")
    if len(x) == 0:
        return out
    tiles = choose_tile(weight, len(x), multiprocessors(x.device), rounded=rounded)
    of_rows = weight.scales if x_scales is None else x_scales
    if weight.squares:
        tiles["BK"] = SQUARE
    _scaled_linear[(triton.cdiv(rows, tiles["BN"]), triton.cdiv(len(x), tiles["ROWS"]))](
        check_dense("x", x), of_rows, check_dense("values", weight.values),
        check_dense("scales", weight.scales), weight.scales if bias is None else bias, out, len(x), rows,
        out.stride(0), *of_rows.stride(), K=columns,
        SQUARES=weight.squares, WHOLE=x.dtype == INT8, BIASED=bias is not None, ROUNDED=rounded,
        OPERAND=tl.float16 if rounded else operand_type(x.dtype), **tiles,
    )  # fmt: skip
    return out
