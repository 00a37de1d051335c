"""The gated activation, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two

_WIDTH = 2048
"""Numbers a program computes: 16 bytes of bfloat16 twice a thread of four warps."""


@triton.jit
def silu_times(gate, up, TYPE: tl.constexpr):
    """Return `silu(gate) * up` of float32 `gate` and `up [...]`, as `TYPE`; rounded in between, as two
    operators would.
    """
    silu = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
    return (silu * up).to(TYPE)


@triton.jit
def _swiglu(gate_up, out, columns, WIDTH: tl.constexpr):
    """Gate WIDTH columns of one row of `gate_up [rows, 2 * columns]` into `out [rows, columns]`."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, silu_times(gate, up, out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up` of `gate_up [tokens, 2 * n]`, the gate in the first half: `[tokens, n]`."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(tokens, columns)
    if tokens:
        width = power_of_two(columns) if INTERPRETED else min(_WIDTH, power_of_two(columns, 128))
        # Grid axis 1 ends at 65,535, far above the tokens of a step.
        grid = (triton.cdiv(columns, width), tokens)
        _swiglu[grid](check_dense("gate_up", gate_up), check_dense("out", out), columns, WIDTH=width)
    return out
