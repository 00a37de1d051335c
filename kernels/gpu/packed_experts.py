"""Products of rows with their experts' matrices in packed codes (kernels/packed_stack.py).

Grids, rows and results are those of kernels/gpu/expert_linear.py, the walk along codes that of
packed_product.py. Gates and ups are walks of their own: rows of inputs are read twice, from the cache. A row
has the same bits whatever stands beside it, among few rows as among many; with `one_tile` in both alike.
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
)
from kernels.gpu.route_experts import RoutedRows
from kernels.gpu.swiglu import ACTIVATIONS, gated
from kernels.packed_stack import PackedStack

FEW_ROWS = 16
"""Rows of a step up to which tiles have as many."""


@triton.jit
def _packed_experts(
    x, codes, scales, supers, zeros, super_least, table, order, bias, pairs, firsts, out, outputs, rows,
    limit, K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, FOUR: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SUPERS: tl.constexpr, ZERO_AT: tl.constexpr, ORDERED: tl.constexpr,
    PER_TOKEN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows of one expert.

    `codes [tiles, rows, bytes]` of the `rows` rows of all experts. GATED: `x [T, K]`, of which place p of
    `pairs` takes row `pairs[p] // PER_TOKEN`, an expert's `2 * outputs` rows with gates first, `out [T *
    PER_TOKEN, outputs]` by place. Else `x` by place, an expert's `outputs` rows, `out` by pair. `bias` is
    `[rows]`; grid `[ceil(outputs / BN), E, tiles of rows]`.
    """
    STORED: tl.constexpr = out.dtype.element_ty
    expert = tl.program_id(1)
    first = tl.load(firsts + expert) + tl.program_id(2) * ROWS
    end = tl.load(firsts + expert + 1)
    if first < end:
        place = first + tl.arange(0, ROWS)
        mask = place < end
        pair = tl.load(pairs + place, mask=mask, other=0)
        lane = tl.program_id(0) * BN + tl.arange(0, BN)
        output = tl.minimum(lane, outputs - 1)  # lanes beyond the last output read its codes once more
        real = mask[None, :]
        if GATED:
            x_row = x + (pair // PER_TOKEN).to(tl.int64)[None, :] * K
            row = expert * 2 * outputs + output
            gate = packed_product(
                x_row, real, row, rows, codes, scales, supers, zeros, super_least, table, order, K, GROUP,
                RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED, TYPE, ROWS, BN, AHEAD,
            )  # fmt: skip
            up = packed_product(
                x_row, real, row + outputs, rows, codes, scales, supers, zeros, super_least, table, order, K,
                GROUP, RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED, TYPE, ROWS, BN, AHEAD,
            )  # fmt: skip
            if BIASED:
                gate += tl.load(bias + row).to(tl.float32)[:, None]
                up += tl.load(bias + row + outputs).to(tl.float32)[:, None]
            gate, up = gate.to(STORED).to(tl.float32), up.to(STORED).to(tl.float32)
            result = gated(gate, up, limit, ACTIVATION, STORED)
            target = place.to(tl.int64)
        else:
            x_row = x + place.to(tl.int64)[None, :] * K
            row = expert * outputs + output
            acc = packed_product(
                x_row, real, row, rows, codes, scales, supers, zeros, super_least, table, order, K, GROUP,
                RUN, FOUR, KIND, OFFSET, SUPERS, ZERO_AT, ORDERED, TYPE, ROWS, BN, AHEAD,
            )  # fmt: skip
            if BIASED:
                acc += tl.load(bias + row).to(tl.float32)[:, None]
            result = acc.to(STORED)
            target = pair.to(tl.int64)
        tl.store(
            out + target[None, :] * outputs + lane[:, None], result, mask=real & (lane < outputs)[:, None]
        )


def packed_expert_swiglu(
    x: torch.Tensor,
    weight: PackedStack,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    *,
    activation: str = "silu",
    limit: float | None = None,
    one_tile: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of `x [T, K]` with its experts' gates and ups: `[T * per_token, n]`, by expert.

    `weight [E, 2 * n, K]` has the gates first, `bias` is `[E, 2 * n]`; `activation` and `limit` as in
    swiglu.py. With `one_tile` a row has the same bits in a step of any number of rows. Raises ValueError for
    rows of another width.
    """
    if out is None:
        out = x.new_empty(routed.order.numel(), weight.shape[1] // 2)
    _launch(x, weight, bias, routed, out, ACTIVATIONS[activation], limit, one_tile)
    return out


def packed_expert_linear(
    x: torch.Tensor,
    weight: PackedStack,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    *,
    one_tile: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of `x [T * per_token, K]`, by expert, with its expert's `weight [E, N, K]`.

    `bias` is `[E, N]`, `one_tile` as in packed_expert_swiglu. Returns `[T * per_token, N]` in the order of
    pairs. Raises ValueError for rows of another width.
    """
    if out is None:
        out = x.new_empty(routed.order.numel(), weight.shape[1])
    _launch(x, weight, bias, routed, out, None, None, one_tile)
    return out


def _launch(
    x: torch.Tensor,
    weight: PackedStack,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    out: torch.Tensor,
    activation: int | None,
    limit: float | None,
    one_tile: bool,
) -> None:
    tokens, per_token = routed.experts.shape
    experts, _, columns = weight.shape
    if x.shape[1] != columns:
        raise ValueError(f"rows of {x.shape[1]} numbers times experts' weights of {columns}")
    if tokens == 0:
        return
    matrix, outputs = weight.matrix, out.shape[1]
    tiles = few_tile(outputs, matrix) if one_tile or tokens <= FEW_ROWS else many_tile(matrix)
    # An expert has no more rows than the step.
    grid = (triton.cdiv(outputs, tiles["BN"]), experts, triton.cdiv(tokens, tiles["ROWS"]))
    _packed_experts[grid](
        check_dense("x", x), *matrix_tensors(matrix), matrix.codes if bias is None else bias, routed.order,
        routed.firsts, check_dense("out", out), outputs, matrix.shape[0], limit or 0.0, PER_TOKEN=per_token,
        GATED=activation is not None, ACTIVATION=activation or 0, BIASED=bias is not None,
        TYPE=operand_type(x.dtype), **matrix_constants(matrix), **tiles,
    )  # fmt: skip
