"""Products of rows with the matrices of their experts, and the sum of each row's contributions.

Rows are taken in the order of their experts (kernels/gpu/route_experts.py), a tile of rows of one expert and
a tile of outputs a program. An expert has no more rows than the step, so a grid of experts times tiles of
rows holds every choice: launches are the same whatever was chosen, and programs without rows end at once. The
sum runs over the depth in one order, and a row's bits do not depend on how many rows its expert has, as long
as tiles are of one size (`_FEW`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type, power_of_two
from kernels.gpu.product_tiles import product_tile
from kernels.gpu.route_experts import RoutedRows
from kernels.gpu.swiglu import ACTIVATIONS, gated

_FEW = 16
"""Rows of a step up to which tiles have as many."""
_COLUMNS = 1024


@triton.jit
def _product(x, row, mask, weight, output, known, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Return float32 `[ROWS, BN]`: rows `row` of `x [n, K]` times rows `output` of `weight [m, K]`."""
    k = tl.arange(0, BK)
    acc = tl.zeros([ROWS, BN], tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        x_place = x + row[:, None] * K + start + k[None, :]
        tile = tl.load(x_place, mask=mask[:, None] & inside[None, :], other=0.0)
        w_place = weight + output[None, :] * K + start + k[:, None]
        columns = tl.load(w_place, mask=known[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(tile.to(TYPE), columns.to(TYPE), acc, input_precision="ieee")
    return acc


@triton.jit
def _expert_linear(
    x, weight, bias, order, firsts, out, outputs, limit,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows of one expert.

    GATED: `x [T, K]`, of which place p of `order` takes row `order[p] // PER_TOKEN`, `weight [E, 2 * outputs,
    K]`, gates first, `out [T * PER_TOKEN, outputs]` by place. Else `x` by place, `weight [E, outputs, K]`,
    `out` by pair. `bias` is `[E, rows of weight]`; grid `[ceil(outputs / BN), E, tiles of rows]`.
    """
    STORED: tl.constexpr = out.dtype.element_ty
    expert = tl.program_id(1)
    first = tl.load(firsts + expert) + tl.program_id(2) * ROWS
    end = tl.load(firsts + expert + 1)
    if first < end:
        place = first + tl.arange(0, ROWS)
        mask = place < end
        pair = tl.load(order + place, mask=mask, other=0)
        output = tl.program_id(0) * BN + tl.arange(0, BN)
        known = output < outputs
        wide = output.to(tl.int64)
        if GATED:
            row = (pair // PER_TOKEN).to(tl.int64)
            own = weight + expert.to(tl.int64) * (2 * outputs) * K
            gate = _product(x, row, mask, own, wide, known, K, ROWS, BN, BK, TYPE)
            up = _product(x, row, mask, own, wide + outputs, known, K, ROWS, BN, BK, TYPE)
            if BIASED:
                gate += tl.load(bias + expert * 2 * outputs + output, mask=known, other=0.0).to(tl.float32)
                up += tl.load(bias + (expert * 2 + 1) * outputs + output, mask=known, other=0.0).to(
                    tl.float32
                )
            gate, up = gate.to(STORED).to(tl.float32), up.to(STORED).to(tl.float32)
            result = gated(gate, up, limit, ACTIVATION, STORED)
            target = place.to(tl.int64)
        else:
            row = place.to(tl.int64)
            own = weight + expert.to(tl.int64) * outputs * K
            acc = _product(x, row, mask, own, wide, known, K, ROWS, BN, BK, TYPE)
            if BIASED:
                acc += tl.load(bias + expert * outputs + output, mask=known, other=0.0).to(tl.float32)
            result = acc.to(STORED)
            target = pair.to(tl.int64)
        tl.store(
            out + target[:, None] * outputs + output[None, :], result, mask=mask[:, None] & known[None, :]
        )


@triton.jit
def _sum_experts(
    parts, weights, experts, shared, switch, out, columns, first_held, end_held,
    COUNT: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr, SWITCHED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Add WIDTH columns of one row's COUNT contributions, in their order, and the shared expert's.

    `parts [rows, COUNT, columns]`, `weights` float32 and `experts` int32 `[rows, COUNT]`, `shared` and `out
    [rows, columns]`, `switch` float32 `[rows]`; with HELD only experts from `first_held` up to `end_held` are
    read and added; grid `[ceil(columns / WIDTH), rows]`.
    """
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < columns
    acc = tl.zeros([WIDTH], tl.float32)
    for number in range(COUNT):
        there = inside
        if HELD:
            expert = tl.load(experts + row * COUNT + number) + at * 0
            there = inside & (expert >= first_held) & (expert < end_held)
        part = tl.load(parts + (row * COUNT + number) * columns + at, mask=there, other=0.0).to(tl.float32)
        acc += part * tl.load(weights + row * COUNT + number)
    if SHARED:
        own = tl.load(shared + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        if SWITCHED:
            own = own / (1.0 + tl.exp(-tl.load(switch + row)))
        acc += own
    tl.store(out + row * columns + at, acc.to(out.dtype.element_ty), mask=inside)


def expert_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    *,
    activation: str = "silu",
    limit: float | None = None,
    one_tile: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of `x [T, K]` with its experts' gates and ups: `[T * per_token, n]`, by expert.

    `weight [E, 2 * n, K]` has the gates first, `bias [E, 2 * n]`; `activation` and `limit` as in swiglu.py.
    With `one_tile` a row has the same bits in a step of any number of rows.
    """
    if out is None:
        out = x.new_empty(routed.order.numel(), weight.shape[1] // 2)
    _launch(x, weight, bias, routed, out, ACTIVATIONS[activation], limit, one_tile)
    return out


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    *,
    one_tile: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of `x [T * per_token, K]`, by expert, with its expert's `weight [E, N, K]`.

    `bias` is `[E, N]`, `one_tile` as in expert_swiglu. Returns `[T * per_token, N]` in the order of pairs.
    """
    if out is None:
        out = x.new_empty(routed.order.numel(), weight.shape[1])
    _launch(x, weight, bias, routed, out, None, None, one_tile)
    return out


def sum_experts(
    parts: torch.Tensor,
    routed: RoutedRows,
    shared: torch.Tensor | None = None,
    switch: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the contributions `parts [T * per_token, n]` of each row, times their weights: `[T, n]`.

    Sums are float32, in ascending order of the experts, those of `routed.held` if not all are there; then
    `shared [T, n]`, times the sigmoid of `switch` (float32 `[T]`), if they are there.
    """
    tokens, count = routed.weights.shape
    columns = parts.shape[1]
    if out is None:
        out = parts.new_empty(tokens, columns)
    if tokens:
        width = min(_COLUMNS, power_of_two(columns))
        _sum_experts[(triton.cdiv(columns, width), tokens)](
            check_dense("parts", parts), routed.weights, routed.experts,
            parts if shared is None else check_dense("shared", shared),
            parts if switch is None else check_dense("switch", switch), check_dense("out", out), columns,
            *((0, 0) if routed.held is None else (routed.held.start, routed.held.stop)),
            COUNT=count, HELD=routed.held is not None, SHARED=shared is not None, SWITCHED=switch is not None,
            WIDTH=width,
        )  # fmt: skip
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routed: RoutedRows,
    out: torch.Tensor,
    activation: int | None,
    limit: float | None,
    one_tile: bool,
) -> None:
    tokens, per_token = routed.experts.shape
    if tokens == 0:
        return
    if weight.dtype != x.dtype or x.shape[1] != weight.shape[2]:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} times experts of {weight.dtype} {tuple(weight.shape)}")
    tiles = product_tile(x.device, f"experts, {'few' if one_tile or tokens <= _FEW else 'many'} rows")
    rows = triton.cdiv(tokens, tiles["ROWS"])
    _expert_linear[(triton.cdiv(out.shape[1], tiles["BN"]), len(weight), rows)](
        check_dense("x", x), check_dense("weight", weight), weight if bias is None else bias,
        routed.order, routed.firsts, check_dense("out", out), out.shape[1], limit or 0.0, K=x.shape[1],
        PER_TOKEN=per_token, GATED=activation is not None, ACTIVATION=activation or 0,
        BIASED=bias is not None, TYPE=operand_type(x.dtype), **tiles,
    )  # fmt: skip
