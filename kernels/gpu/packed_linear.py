"""Products with matrices in packed codes (kernels/packed_matrix.py), which are unpacked in registers.

A tile of weights is the left operand of the matrix instructions, as in kernels/gpu/skinny_linear.py: codes
come from memory once, become numbers, and are rounded to the type of `x` (packed_product.py). Up to FEW_ROWS
rows are padded to sixteen columns; more rows are cut into tiles of MANY_ROWS. The matrix alone chooses the
tiles and nothing is split along the depth, so that a row comes to the same bits whatever stands beside it,
among few rows as among many. `unpack` writes the numbers out, for the library's products of whole prompts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type
from kernels.gpu.packed_product import (
    few_tile,
    many_tile,
    matrix_constants,
    matrix_tensors,
    packed_product,
    read_bytes,
    read_run,
)
from kernels.packed_matrix import PackedMatrix

FEW_ROWS = 16
"""Rows of a step that are padded to as many columns of one tile."""
MANY_ROWS = 64
_UNPACKED_ROWS = 32


@triton.jit(do_not_specialize=["count"])
def _packed_linear(
    x, codes, scales, supers, zeros, super_least, table, order, bias, out, count, rows, stride,
    K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, FOUR: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SUPERS: tl.constexpr, ZERO_AT: tl.constexpr, ORDERED: tl.constexpr,
    BIASED: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows.

    `x [count, K]`, `codes [ceil(K / (2 RUN)), rows, bytes]`, `bias [rows]`, `out [count, rows]` whose rows
    begin `stride` numbers apart; grid `[ceil(rows / BN), ceil(count / ROWS)]`. `rows` are the matrix' rows,
    its outputs.
    """
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(lane, rows - 1)  # lanes beyond the last output read its codes once more
    input = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (input < count)[None, :]
    x_row = x + input.to(tl.int64)[None, :] * K
    acc = packed_product(
        x_row, real, row, rows, codes, scales, supers, zeros, super_least, table, order, K, GROUP, RUN, FOUR,
        KIND, OFFSET, SUPERS, ZERO_AT, ORDERED, TYPE, ROWS, BN, AHEAD,
    )  # fmt: skip
    if BIASED:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    target = out + input.to(tl.int64)[None, :] * stride + lane[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real & (lane < rows)[:, None])


@triton.jit
def _unpack(
    codes, scales, supers, zeros, super_least, table, order, out, rows,
    K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, FOUR: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SUPERS: tl.constexpr, ZERO_AT: tl.constexpr, ORDERED: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write the numbers of one tile of BN rows into `out [rows, K]`; grid `[ceil(rows / BN), tiles]`."""
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(lane, rows - 1)
    tile = tl.program_id(1)
    low, high = read_bytes(codes, tile, row, rows, RUN, FOUR)
    for half in tl.static_range(2):
        number, target, inside = read_run(
            low, high, tile * 2 * RUN, row, rows, scales, supers, zeros, super_least, table, order, half,
            K, GROUP, RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED,
        )  # fmt: skip
        tl.store(
            out + row.to(tl.int64)[:, None] * K + target[None, :], number.to(out.dtype.element_ty),
            mask=inside[None, :] & (lane < rows)[:, None],
        )  # fmt: skip


def packed_linear(
    x: torch.Tensor,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x [T, columns]` with the transpose of `weight`, and add `bias [rows]`: `[T, rows]`.

    Numbers are rounded to the type of `x`, sums are float32 and rounded once, to the type of `out`. Any shape
    is right, and `out` may be columns of a wider tensor. Raises ValueError for rows of another width.
    """
    if x.shape[1] != weight.columns:
        raise ValueError(f"rows of {x.shape[1]} numbers times weights of {weight.columns}")
    rows = weight.shape[0]
    if out is None:
        out = x.new_empty(len(x), rows)
    if len(x) == 0:
        return out
    if out.stride(1) != 1:
        raise ValueError("the outputs of a row lie apart")
    tiles = few_tile(rows, weight) if len(x) <= FEW_ROWS else many_tile(weight)
    _packed_linear[(triton.cdiv(rows, tiles["BN"]), triton.cdiv(len(x), tiles["ROWS"]))](
        check_dense("x", x), *matrix_tensors(weight), weight.codes if bias is None else bias,
        out, len(x), rows, out.stride(0), BIASED=bias is not None, TYPE=operand_type(x.dtype),
        **matrix_constants(weight), **tiles,
    )  # fmt: skip
    return out


def unpack(weight: PackedMatrix, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of `weight` into `out [rows, columns]`, rounded to its type, and return it."""
    rows, columns = weight.shape
    if tuple(out.shape) != (rows, columns):
        raise ValueError(f"{tuple(out.shape)} is no room for {rows} rows of {columns} numbers")
    _unpack[(triton.cdiv(rows, _UNPACKED_ROWS), len(weight.codes))](
        *matrix_tensors(weight), check_dense("out", out), rows, BN=_UNPACKED_ROWS, **matrix_constants(weight)
    )
    return out
