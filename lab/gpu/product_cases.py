"""Launches of the step's products over random matrices, for the search of their tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from kernels.packed_matrix import pack
from kernels.scaled_matrix import ScaledMatrix
from lab.gpu.timing import Work

Sizes = tuple[tuple[int, int], ...]
"""Rows and columns of matrices."""
_EXPERTS, _CHOSEN = 128, 8
_DRY_EXPERTS, _DRY_COLUMNS = 4, 256


def _each(
    rows: int,
    sizes: Sizes,
    device: torch.device,
    work: Callable[[torch.Tensor, torch.Tensor, int, int], Work],
) -> list[Work]:
    """Return the work of `(x [rows, columns], out [rows, outputs], outputs, columns)` for every size."""
    return [
        work(
            torch.randn(rows, columns, device=device).bfloat16(),
            torch.empty(rows, outputs, device=device, dtype=torch.bfloat16),
            outputs,
            columns,
        )
        for outputs, columns in sizes
    ]


def skinny_work(device: torch.device, rows: int, sizes: Sizes) -> list[Work]:
    """Return products of full numbers of 16 bits, few rows."""
    from kernels.gpu.skinny_linear import skinny_linear

    def work(x: torch.Tensor, out: torch.Tensor, outputs: int, columns: int) -> Work:
        weight = torch.randn(outputs, columns, device=device, dtype=torch.bfloat16)
        return partial(skinny_linear, x, weight, None, out=out)

    return _each(rows, sizes, device, work)


def scaled_work(
    dtype: torch.dtype, device: torch.device, rows: int, sizes: Sizes, *, rounded: bool = True
) -> list[Work]:
    """Return products of FP8 or int8 with a scale a row, of rows that are `rounded` or not."""
    from kernels.gpu.round_rows import round_rows
    from kernels.gpu.scaled_linear import scaled_linear

    def work(x: torch.Tensor, out: torch.Tensor, outputs: int, columns: int) -> Work:
        values = torch.randint(0, 100, (outputs, columns), dtype=torch.uint8, device=device).view(dtype)
        weight = ScaledMatrix(values, torch.ones(outputs, 1, device=device))
        given, scales = round_rows(x, dtype) if rounded else (x, None)
        return partial(scaled_linear, given, scales, weight, out=out)

    return _each(rows, sizes, device, work)


def packed_work(
    kind: Literal["int4", "int8"], group: int, device: torch.device, rows: int, sizes: Sizes
) -> list[Work]:
    """Return products of codes of a `kind` of kernels/packed_matrix.py in groups of so many."""
    from kernels.gpu.packed_linear import packed_linear

    def work(x: torch.Tensor, out: torch.Tensor, outputs: int, columns: int) -> Work:
        most = 16 if kind == "int4" else 256
        codes = torch.randint(0, most, (outputs, columns), dtype=torch.uint8)
        codes[0, :2] = torch.tensor([0, most - 1])
        matrix = pack(kind, codes, torch.ones(outputs, columns // group).half(), group, zero=most // 2)
        assert matrix is not None
        return partial(packed_linear, x, matrix.to(device), out=out)

    return _each(rows, sizes, device, work)


def expert_work(device: torch.device, rows: int, sizes: Sizes) -> list[Work]:
    """Return products of a layer of Qwen3-30B-A3B's experts with matrices of these sizes, in 16 bits."""
    from kernels.gpu.expert_linear import expert_swiglu
    from kernels.gpu.route_experts import RoutedRows, route_experts

    def work(x: torch.Tensor, out: torch.Tensor, outputs: int, columns: int) -> Work:
        experts = _EXPERTS if columns > _DRY_COLUMNS else _DRY_EXPERTS
        chosen = min(_CHOSEN, experts)
        weight = torch.randn(experts, outputs, columns, device=device, dtype=torch.bfloat16)
        router = torch.randn(experts, columns, device=device)
        routed = RoutedRows.make(rows, experts, chosen, device)
        routed = route_experts(x, router, None, None, out=routed, count=chosen)
        return partial(expert_swiglu, x, weight, None, routed)

    return _each(rows, sizes, device, work)
