"""Gate of a recurrence's outputs, and their norm by groups, before or behind it, one program a group.

The meaning is `group_norm` of diptych/engine/backends/torch/recurrent/norms.py and the gates of
gated_delta.py and mamba2.py, in float32. A group's sum depends on its own numbers alone.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import power_of_two
from kernels.gpu.rms_norm import row_warps
from kernels.gpu.state_tiles import silu

_ORDERS = {"none": 0, "after_gate": 1, "before_gate": 2}
_AFTER_GATE, _BEFORE_GATE = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _group_norm(
    x, gate, weight, out, x_stride, gate_stride, out_stride, eps, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, ORDER: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Gate the COLUMNS numbers of one group of one row of float32 `x [T, groups * COLUMNS]` by `gate` of the
    same shape, and normalise them as ORDER says; `weight` is of a whole row, with SHARED of every group.
    """
    group = tl.program_id(0) * COLUMNS
    row = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < COLUMNS
    value = tl.load(x + row * x_stride + group + at, mask=inside, other=0.0)
    opened = silu(tl.load(gate + row * gate_stride + group + at, mask=inside, other=0.0).to(tl.float32))
    if ORDER == _AFTER_GATE:
        value *= opened
    if ORDER != 0:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / COLUMNS + eps)
        of = at if SHARED else group + at
        value *= tl.load(weight + of, mask=inside, other=0.0).to(tl.float32)
    if ORDER != _AFTER_GATE:
        value *= opened
    tl.store(out + row * out_stride + group + at, value.to(out.dtype.element_ty), mask=inside)


def group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    groups: int,
    order: Literal["after_gate", "before_gate", "none"],
    out: torch.Tensor,
) -> torch.Tensor:
    """Return in `out [T, n]` float32 `x [T, n]`, times the silu of `gate [T, n]`, each of `groups` parts of a
    row normalised before its gate or after it. Rows of all may lie apart.

    `weight` has the numbers of a row, or of a group.
    """
    tokens, numbers = out.shape
    columns = numbers // groups
    if tokens:
        width = power_of_two(columns)
        _group_norm[(groups, tokens)](
            x, gate, x if weight is None else weight, out, x.stride(0), gate.stride(0), out.stride(0), eps,
            COLUMNS=columns, WIDTH=width, ORDER=_ORDERS[order],
            SHARED=weight is not None and len(weight) == columns, num_warps=row_warps(width),
        )  # fmt: skip
    return out
