"""Products with matrices in packed codes (kernels/packed_matrix.py), which are unpacked in registers.

A tile of weights is the left operand of the matrix instructions, as in kernels/gpu/skinny_linear.py: codes
come from memory once, become numbers, and are rounded to the type of `x`. Up to FEW_ROWS rows are padded to
sixteen columns; more rows are cut into tiles of MANY_ROWS. The matrix alone chooses the tiles and nothing is
split along the depth, so that a row comes to the same bits whatever stands beside it, among few rows as among
many. `unpack` writes the numbers out, for the library's products of whole prompts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type
from kernels.packed_matrix import PackedMatrix

FEW_ROWS = 16
"""Rows of a step that are padded to as many columns of one tile."""
MANY_ROWS = 64

_INT, _TABLE, _FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CODES = {"int4": 0, "int8": 0, "table4": 1, "fp8": 2}
_ZERO, _ZEROS, _LEAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# By arithmetic, not measured: 4 KiB of codes on their way a program and stage, and on an H200 two programs or
# more for every multiprocessor from 8,192 outputs on.
_FEW_TILE = {"ROWS": FEW_ROWS, "BN": 32, "TILES": 4, "num_warps": 4, "num_stages": 3}
_MANY_TILE = {"ROWS": MANY_ROWS, "BN": 64, "TILES": 1, "num_warps": 4, "num_stages": 3}
_UNPACKED_ROWS = 32


@triton.jit
def _e4m3(bits):
    """Return float32 of E4M3 `bits` (int32), on cards without the format too."""
    # The exponent's bias is 7 where float32 has 127; subnormal numbers come out right, too.
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _of_group(numbers, supers, group, row, rows, SUPERS: tl.constexpr):
    """Return float32 of `numbers [groups, rows]` at one group, times its entry of `supers`."""
    own = tl.load(numbers + group.to(tl.int64) * rows + row).to(tl.float32)
    if SUPERS:
        own = tl.load(supers + (group // SUPERS).to(tl.int64) * rows + row).to(tl.float32) * own
    return own


@triton.jit
def _numbers(code, group, row, rows, scales, supers, zeros, super_least, table, ZERO_AT: tl.constexpr,
             KIND: tl.constexpr, OFFSET: tl.constexpr, SUPERS: tl.constexpr):  # fmt: skip
    """Return float32 numbers of int32 `code [BN, RUN]` of rows `row [BN]`, all of one group."""
    if KIND == _TABLE:
        value = tl.load(table + code)
    elif KIND == _FP8:
        value = _e4m3(code)
    else:
        value = code.to(tl.float32)
    scale = _of_group(scales, supers, group, row, rows, SUPERS)[:, None]
    if OFFSET == _LEAST:
        return scale * value + _of_group(zeros, super_least, group, row, rows, SUPERS)[:, None]
    if OFFSET == _ZEROS:
        return scale * (value - _of_group(zeros, supers, group, row, rows, 0)[:, None])
    return scale * (value - ZERO_AT)


@triton.jit
def _read_run(at, packed, begin, row, rows, scales, supers, zeros, super_least, table, order,
              HALF: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
              FOUR: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SUPERS: tl.constexpr,
              ZERO_AT: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """Return float32 numbers `[BN, RUN]` of one HALF of a tile that begins at column `begin`, the inputs
    `[RUN]` that they multiply, and which of these there are.

    `at [BN, RUN]` is the place of the tile's first RUN bytes, which are `packed`, of rows `row [BN]`.
    """
    if FOUR:
        code = (packed >> 4) if HALF else (packed & 15)
    elif HALF:
        code = tl.load(at + RUN).to(tl.int32)
    else:
        code = packed
    first = begin + HALF * RUN
    group = tl.minimum(first // GROUP, (K + GROUP - 1) // GROUP - 1)
    numbers = _numbers(code, group, row, rows, scales, supers, zeros, super_least, table, ZERO_AT, KIND,
                       OFFSET, SUPERS)  # fmt: skip
    k = first + tl.arange(0, RUN)
    inside = k < K
    if ORDERED:
        source = tl.load(order + k, mask=inside, other=0)
    else:
        source = k
    return numbers, source, inside


@triton.jit(do_not_specialize=["count"])
def _packed_linear(
    x, codes, scales, supers, zeros, super_least, table, order, bias, out, count, rows, stride,
    K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, FOUR: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SUPERS: tl.constexpr, ZERO_AT: tl.constexpr, ORDERED: tl.constexpr,
    BIASED: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows, TILES tiles of the depth at a time.

    `x [count, K]`, `codes [ceil(K / (2 RUN)), rows, bytes]`, `bias [rows]`, `out [count, rows]` whose rows
    begin `stride` numbers apart; grid `[ceil(rows / BN), ceil(count / ROWS)]`. `rows` are the matrix' rows,
    its outputs.
    """
    STORED: tl.constexpr = x.dtype.element_ty
    LENGTH: tl.constexpr = (K + 2 * RUN - 1) // (2 * RUN)
    BYTES: tl.constexpr = RUN if FOUR else 2 * RUN
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(lane, rows - 1)  # lanes beyond the last output read its codes once more
    input = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (input < count)[None, :]
    code_place = codes + row.to(tl.int64)[:, None] * BYTES + tl.arange(0, RUN)[None, :]
    x_row = x + input.to(tl.int64)[None, :] * K
    acc = tl.zeros([BN, ROWS], tl.float32)
    for start in range(0, LENGTH, TILES):
        for step in tl.static_range(TILES):
            # Steps beyond the last tile read it once more, and multiply it with zeros.
            tile = tl.minimum(start + step, LENGTH - 1)
            at = code_place + tile.to(tl.int64) * rows * BYTES
            packed = tl.load(at).to(tl.int32)
            for half in tl.static_range(2):
                weight, source, inside = _read_run(
                    at, packed, (start + step) * 2 * RUN, row, rows, scales, supers, zeros, super_least,
                    table, order, half, K, GROUP, RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED,
                )  # fmt: skip
                columns = tl.load(x_row + source[:, None], mask=real & inside[:, None], other=0.0)
                acc = tl.dot(weight.to(STORED).to(TYPE), columns.to(TYPE), acc, input_precision="ieee")
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
    BYTES: tl.constexpr = RUN if FOUR else 2 * RUN
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(lane, rows - 1)
    tile = tl.program_id(1)
    place = tl.arange(0, RUN)
    at = codes + tile.to(tl.int64) * rows * BYTES + row.to(tl.int64)[:, None] * BYTES + place[None, :]
    packed = tl.load(at).to(tl.int32)
    for half in tl.static_range(2):
        number, target, inside = _read_run(
            at, packed, tile * 2 * RUN, row, rows, scales, supers, zeros, super_least, table, order, half,
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
    tiles = _FEW_TILE if len(x) <= FEW_ROWS else _MANY_TILE
    _packed_linear[(triton.cdiv(rows, tiles["BN"]), triton.cdiv(len(x), tiles["ROWS"]))](
        check_dense("x", x), *_tensors(weight), weight.codes if bias is None else bias,
        out, len(x), rows, out.stride(0), BIASED=bias is not None, TYPE=operand_type(x.dtype),
        **_constants(weight), **tiles,
    )  # fmt: skip
    return out


def unpack(weight: PackedMatrix, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of `weight` into `out [rows, columns]`, rounded to its type, and return it."""
    rows, columns = weight.shape
    if tuple(out.shape) != (rows, columns):
        raise ValueError(f"{tuple(out.shape)} is no room for {rows} rows of {columns} numbers")
    _unpack[(triton.cdiv(rows, _UNPACKED_ROWS), len(weight.codes))](
        *_tensors(weight), check_dense("out", out), rows, BN=_UNPACKED_ROWS, **_constants(weight)
    )
    return out


def _tensors(weight: PackedMatrix) -> tuple[torch.Tensor, ...]:
    """Return what the kernels read of a matrix; codes stand for what it has not."""
    offsets = weight.zeros if weight.least is None else weight.least
    optional = (weight.supers, offsets, weight.super_least, weight.table, weight.order)
    supers, zeros, super_least, table, order = (weight.codes if one is None else one for one in optional)
    return weight.codes, weight.scales, supers, zeros, super_least, table, order


def _constants(weight: PackedMatrix) -> dict[str, Any]:
    offset = 2 if weight.least is not None else 0 if weight.zeros is None else 1
    return {
        "K": weight.columns,
        "GROUP": weight.group,
        "RUN": weight.run,
        "FOUR": weight.four_bits,
        "KIND": _CODES[weight.code],
        "OFFSET": offset,
        "SUPERS": 0 if weight.supers is None else weight.supers_of,
        "ZERO_AT": weight.zero,
        "ORDERED": weight.order is not None,
    }
