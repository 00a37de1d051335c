"""Walk of one tile of outputs along a packed matrix (kernels/packed_matrix.py): codes in, float32 sums out.

Used by kernels/gpu/packed_linear.py and packed_experts.py. A step of the walk reads a tile of codes, two runs
of columns; no group ends within a run, so that scale and zero are read once a run. With AHEAD the bytes of
the next tile are asked for before this one is made numbers: arithmetic hides their way from memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.package_tiles import Tile
from kernels.gpu.product_tiles import product_tile
from kernels.packed_matrix import PackedMatrix

_TABLE, _FP8, _FP4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_CODES = {"int4": 0, "int8": 0, "table4": 1, "fp8": 2, "fp4": 3}
_ZEROS, _LEAST = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _e4m3(bits):
    """Return float32 of E4M3 `bits` (int32), on cards without the format too."""
    # The exponent's bias is 7 where float32 has 127; subnormal numbers come out right, too.
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _e2m1(bits):
    """Return float32 of E2M1 `bits` (int32, OCP Microscaling Formats 1.0)."""
    # The exponent's bias is 1: 2 ** 126 away from that of float32.
    moved = ((bits & 8) << 28) | ((bits & 7) << 22)
    return moved.to(tl.float32, bitcast=True) * 8.507059173023462e37


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
    elif KIND == _FP4:
        value = _e2m1(code)
    else:
        value = code.to(tl.float32)
    scale = _of_group(scales, supers, group, row, rows, SUPERS)[:, None]
    if OFFSET == _LEAST:
        return scale * value + _of_group(zeros, super_least, group, row, rows, SUPERS)[:, None]
    if OFFSET == _ZEROS:
        return scale * (value - _of_group(zeros, supers, group, row, rows, 0)[:, None])
    return scale * (value - ZERO_AT)


@triton.jit
def read_bytes(codes, tile, row, rows, RUN: tl.constexpr, FOUR: tl.constexpr):
    """Return the bytes `[BN, RUN]` of both halves of one tile of rows `row [BN]`; FOUR: the same twice."""
    BYTES: tl.constexpr = RUN if FOUR else 2 * RUN
    at = codes + tile.to(tl.int64) * rows * BYTES + row.to(tl.int64)[:, None] * BYTES
    at += tl.arange(0, RUN)[None, :]
    low = tl.load(at)
    if FOUR:
        high = low
    else:
        high = tl.load(at + RUN)
    return low, high


@triton.jit
def read_run(low, high, begin, row, rows, scales, supers, zeros, super_least, table, order,
             HALF: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
             FOUR: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SUPERS: tl.constexpr,
             ZERO_AT: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """Return float32 numbers `[BN, RUN]` of one HALF of a tile that begins at column `begin`, the inputs
    `[RUN]` that they multiply, and which of these there are.
    """
    if FOUR:
        code = low.to(tl.int32)
        code = (code >> 4) if HALF else (code & 15)
    elif HALF:
        code = high.to(tl.int32)
    else:
        code = low.to(tl.int32)
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


@triton.jit
def packed_product(
    x_row, real, row, rows, codes, scales, supers, zeros, super_least, table, order,
    K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, FOUR: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SUPERS: tl.constexpr, ZERO_AT: tl.constexpr, ORDERED: tl.constexpr,
    TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return float32 `[BN, ROWS]`: rows `row [BN]` of a packed matrix of `rows` rows times rows of inputs.

    `x_row [1, ROWS]` are the places where rows of K inputs begin, `real [1, ROWS]` says which there are;
    `codes [ceil(K / (2 RUN)), rows, bytes]`. Numbers are rounded to the type of the inputs, and multiplied
    in TYPE.
    """
    STORED: tl.constexpr = x_row.dtype.element_ty
    LENGTH: tl.constexpr = (K + 2 * RUN - 1) // (2 * RUN)
    WHOLE: tl.constexpr = K % (2 * RUN) == 0
    acc = tl.zeros([BN, ROWS], tl.float32)
    if AHEAD:
        low, high = read_bytes(codes, tl.full([], 0, tl.int32), row, rows, RUN, FOUR)
    for tile in range(LENGTH):
        if AHEAD:  # the last tile is read once more
            next_low, next_high = read_bytes(codes, tl.minimum(tile + 1, LENGTH - 1), row, rows, RUN, FOUR)
        else:
            low, high = read_bytes(codes, tl.minimum(tile, LENGTH - 1), row, rows, RUN, FOUR)
        for half in tl.static_range(2):
            weight, source, inside = read_run(
                low, high, tile * 2 * RUN, row, rows, scales, supers, zeros, super_least, table, order,
                half, K, GROUP, RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED,
            )  # fmt: skip
            mask = real if WHOLE else real & inside[:, None]
            columns = tl.load(x_row + source[:, None], mask=mask, other=0.0)
            acc = tl.dot(weight.to(STORED).to(TYPE), columns.to(TYPE), acc, input_precision="ieee")
        if AHEAD:
            low, high = next_low, next_high
    return acc


def matrix_tensors(weight: PackedMatrix) -> tuple[torch.Tensor, ...]:
    """Return what the kernels read of a matrix, in their order; codes stand for what it has not."""
    offsets = weight.zeros if weight.least is None else weight.least
    optional = (weight.supers, offsets, weight.super_least, weight.table, weight.order)
    supers, zeros, super_least, table, order = (weight.codes if one is None else one for one in optional)
    return weight.codes, weight.scales, supers, zeros, super_least, table, order


def matrix_constants(weight: PackedMatrix) -> dict[str, Any]:
    """Return the compile-time arguments of the kernels that describe a matrix' format."""
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


def few_tile(outputs: int, weight: PackedMatrix) -> Tile:
    """Return the tile of a step of up to sixteen rows of a matrix, or an expert's, of `outputs` rows, on the
    card where the matrix is.

    Smaller matrices have smaller tiles: a card wants a program for every other multiprocessor at least.
    """
    width = "wide" if outputs >= _WIDE else "narrow" if outputs >= _NARROW else "least"
    return product_tile(weight.codes.device, f"{4 if weight.four_bits else 8} bits, few rows, {width}")


_WIDE, _NARROW = 4096, 1024


def many_tile(weight: PackedMatrix) -> Tile:
    """Return the tile of more rows, on the card where the matrix is."""
    return product_tile(weight.codes.device, f"codes, many rows{', long runs' if weight.run > 64 else ''}")
