"""Products of a few rows with a matrix of weights, at the speed at which the weights come from memory.

The tile of weights is the left operand of the matrix instructions, and the rows of `x`, transposed and padded
to sixteen, are the right one: sixteen rows take the time of one, and a row comes to the same bits whatever
stands beside it. For the same reason the matrix alone chooses the tiles, never the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type
from kernels.gpu.product_tiles import product_tile
from kernels.gpu.swiglu import ACTIVATIONS, gated

MOST_ROWS = 16
"""Columns that the right operand is padded to; reading the weights takes longer than multiplying them."""

_MANY_OUTPUTS = 16384
"""Rows of weights from which tiles of 64 give every multiprocessor two programs."""


# The rows of a step vary: one kernel serves them all. What a matrix is decides the rest.
@triton.jit(do_not_specialize=["rows"])
def _skinny_linear(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    limit,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute BN outputs of all rows, BK of the depth at a time.

    `x [rows, K]`, `weight [outputs, K]` (GATED: `[2 * outputs, K]`, gates first), `bias` of as many, `out
    [rows, outputs]`; grid `[ceil(rows of weight / BN)]`.
    """
    STORED: tl.constexpr = out.dtype.element_ty
    COUNT: tl.constexpr = BN // 2 if GATED else BN
    lane = tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = tl.arange(0, ROWS)
    # Lanes beyond the last output read its weights once more, and store nothing.
    if GATED:
        # Each gate stands before its up, so that the two part without leaving the program.
        source = tl.minimum(tl.program_id(0) * COUNT + lane // 2, outputs - 1) + lane % 2 * outputs
    else:
        source = tl.minimum(tl.program_id(0) * COUNT + lane, outputs - 1)
    source = source.to(tl.int64)
    w_place = weight + source[:, None] * K + k[None, :]
    x_place = x + row[None, :] * K + k[:, None]
    real = (row < rows)[None, :]
    acc = tl.zeros([BN, ROWS], tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            tile = tl.load(w_place + start)
            columns = tl.load(x_place + start, mask=real, other=0.0)
        else:
            inside = k < K - start
            tile = tl.load(w_place + start, mask=inside[None, :], other=0.0)
            columns = tl.load(x_place + start, mask=real & inside[:, None], other=0.0)
        acc = tl.dot(tile.to(TYPE), columns.to(TYPE), acc)
    if BIASED:
        acc += tl.load(bias + source).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [COUNT, 2, ROWS]), (0, 2, 1)))
        # Rounded as two products and an activation in a row would.
        gate, up = gate.to(STORED).to(tl.float32), up.to(STORED).to(tl.float32)
        result = gated(gate, up, limit, ACTIVATION, STORED)
    else:
        result = acc.to(STORED)
    output = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    place = out + row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(place, result, mask=real & (output < outputs)[:, None])


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x [M, K]`, M at most MOST_ROWS, with `weight [N, K]` and add `bias [N]`: `[M, N]`.

    Numbers of 16 bits; `out` may be float32: that is what sums are in, and they are rounded once. Any K is
    right, multiples of eight are fast. Raises ValueError for more rows, TypeError for other formats.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight))
    _launch(x, weight, bias, out, None)
    return out


def skinny_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the bits of `swiglu(skinny_linear(x, weight, bias))` in one launch: `[M, n]`.

    `x [M, K]`, `weight [2 * n, K]` with the gates in its first half of rows, `bias [2 * n]`; `activation`
    and `limit` are those of `swiglu`. See `skinny_linear` for formats and limits.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, bias, out, ACTIVATIONS[activation], limit)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: int | None,
    limit: float | None = None,
) -> None:
    """Launch the product; `activation` is the number of its gates' function, None without gates."""
    if len(x) > MOST_ROWS:
        raise ValueError(f"{len(x)} rows; at most {MOST_ROWS} are multiplied at once")
    if x.dtype.itemsize != 2 or weight.dtype != x.dtype:
        raise TypeError(f"{x.dtype} times {weight.dtype}: both are the same format of 16 bits")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} numbers times weights of {weight.shape[1]}")
    if len(x) == 0:
        return
    shape = "tall" if len(weight) >= _MANY_OUTPUTS else "short"
    tiles = product_tile(x.device, f"16 bits, few rows, {shape}")
    _skinny_linear[(triton.cdiv(len(weight), tiles["BN"]),)](
        check_dense("x", x),
        check_dense("weight", weight),
        weight if bias is None else bias,
        check_dense("out", out),
        len(x),
        out.shape[1],
        limit or 0.0,
        K=x.shape[1],
        GATED=activation is not None,
        ACTIVATION=activation or 0,
        BIASED=bias is not None,
        TYPE=operand_type(x.dtype),
        ROWS=MOST_ROWS,
        **tiles,
    )
