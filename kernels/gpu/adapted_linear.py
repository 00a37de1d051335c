"""Changes of products by LoRA adapters, on the GPU: one kernel for A, one for B, without split sums.

Adapters lie where they are; tables of a few numbers a slot name their places, ranks and scales. So a graph
that was recorded over the tables computes whatever lies in the slots later. A program computes numbers of one
row alone, and its sums run over the whole depth in tiles of a fixed width: a row has the same bits beside any
other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.change_table import ChangeTable
from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two

_RANKS = 4
"""Ranks of A that a program multiplies: with 16 four programs read it, side by side."""
_DEPTH, _WIDTH = 1024, 128
"""Inputs of A, and rows of B, that a program reads at once."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _shrink(
    x, slots, table, ranks, scales, out, count,
    K: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Compute BR ranks of one row of `x [T, K]` for one matrix, into `out [T, F, R]` float32.

    `slots [T]`, `table`, `ranks` and `scales [F, count]` as in ChangeTable; grid `[T, R / BR, F]`.
    """
    row, first, matrix = tl.program_id(0), tl.program_id(1) * BR, tl.program_id(2)
    slot = tl.load(slots + row)
    at = matrix * count + tl.maximum(slot, 0)
    rank = tl.where(slot < 0, 0, tl.load(ranks + at))
    if first < rank:
        a = tl.load(table + at).to(tl.pointer_type(TYPE))
        r, k = first + tl.arange(0, BR), tl.arange(0, BK)
        acc = tl.zeros([BR], tl.float32)
        for start in range(0, K, BK):
            inside = start + k < K
            inputs = tl.load(x + row.to(tl.int64) * K + start + k, mask=inside, other=0.0).to(tl.float32)
            real = (r < rank)[:, None] & inside[None, :]
            tile = tl.load(a + r[:, None] * K + start + k[None, :], mask=real, other=0.0).to(tl.float32)
            acc += tl.sum(tile * inputs[None, :], axis=1)
        acc *= tl.load(scales + at)
        tl.store(out + (row.to(tl.int64) * tl.num_programs(2) + matrix) * R + r, acc, mask=r < rank)


@triton.jit
def _expand(
    shrunk, slots, table, ranks, begins, widths, out, count, columns,
    R: tl.constexpr, BN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add to BN columns of one row of `out [T, columns]` for one matrix, of `shrunk [T, F, R]`.

    `slots [T]`, `table` and `ranks [F, count]`, `begins` and `widths [F]` as in ChangeTable; grid `[T,
    ceil(widest / BN), F]`.
    """
    row, first, matrix = tl.program_id(0), tl.program_id(1) * BN, tl.program_id(2)
    slot, width = tl.load(slots + row), tl.load(widths + matrix)
    at = matrix * count + tl.maximum(slot, 0)
    rank = tl.where(slot < 0, 0, tl.load(ranks + at))
    if (rank > 0) & (first < width):
        b = tl.load(table + at).to(tl.pointer_type(TYPE))
        n, r = first + tl.arange(0, BN), tl.arange(0, R)
        inner = tl.load(
            shrunk + (row.to(tl.int64) * tl.num_programs(2) + matrix) * R + r, mask=r < rank, other=0.0
        )
        real = (n < width)[:, None] & (r < rank)[None, :]
        tile = tl.load(b + n[:, None] * rank + r[None, :], mask=real, other=0.0).to(tl.float32)
        added = tl.sum(tile * inner[None, :], axis=1)
        place = out + row.to(tl.int64) * columns + tl.load(begins + matrix) + n
        sums = tl.load(place, mask=n < width, other=0.0).to(tl.float32)
        tl.store(place, (sums + added).to(out.dtype.element_ty), mask=n < width)


def adapted_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    table: ChangeTable,
    scratch: torch.Tensor,
    most_ranks: int,
) -> torch.Tensor:
    """Add to `out` `[T, columns]`, in place, what the adapters in `slots` change of its product with `x`.

    `x [T, in]` is of the adapters' type, `slots` int32 `[T]` has each row's slot or -1, `scratch` float32
    `[n]`, n at least T F R; R is `most_ranks`, a power of two that is at least any rank.
    """
    tokens, depth = x.shape
    matrices, count = table.a.shape
    if not tokens:
        return out
    if most_ranks != power_of_two(most_ranks) or len(scratch) < tokens * matrices * most_ranks:
        raise ValueError(
            f"scratch of {len(scratch)} for {tokens} rows, {matrices} matrices, {most_ranks} ranks"
        )
    kind, some = _TYPES[x.dtype], min(_RANKS, most_ranks)
    deep = power_of_two(depth) if INTERPRETED else min(_DEPTH, power_of_two(depth))
    _shrink[(tokens, most_ranks // some, matrices)](
        check_dense("x", x), slots, table.a, table.ranks, table.scales, scratch, count,
        K=depth, R=most_ranks, BR=some, BK=deep, TYPE=kind,
    )  # fmt: skip
    wide = power_of_two(table.widest) if INTERPRETED else _WIDTH
    _expand[(tokens, triton.cdiv(table.widest, wide), matrices)](
        scratch, slots, table.b, table.ranks, table.begins, table.widths, check_dense("out", out), count,
        out.shape[1], R=most_ranks, BN=wide, TYPE=kind,
    )  # fmt: skip
    return out
