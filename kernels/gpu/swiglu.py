"""Gated activations, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two
from kernels.gpu.scores import tanh

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
"""Numbers of the gates' functions (kernels/swiglu.py) for kernels."""

_GELU, _GELU_TANH, _CLAMPED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_WIDTH = 2048
"""Numbers a program computes: 16 bytes of bfloat16 twice a thread of four warps."""


@triton.jit
def gated(gate, up, limit, ACTIVATION: tl.constexpr, TYPE: tl.constexpr):
    """Return `act(gate) * up` of float32 `gate` and `up [...]`, as `TYPE`; rounded in between, as two
    operators would. `limit` is that of gate and up (clamped_swiglu).
    """
    if ACTIVATION == _CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)).to(TYPE)
    if ACTIVATION == _GELU:
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == _GELU_TANH:
        act = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        act = gate / (1.0 + tl.exp(-gate))
    return (act.to(TYPE).to(tl.float32) * up).to(TYPE)


@triton.jit
def _swiglu(gate_up, out, columns, limit, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    """Gate WIDTH columns of one row of `gate_up [rows, 2 * columns]` into `out [rows, columns]`."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    result = gated(gate, up, limit, ACTIVATION, out.dtype.element_ty)
    tl.store(out + row * columns + at, result, mask=inside)


def swiglu(
    gate_up: torch.Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `act(gate) * up` of `gate_up [tokens, 2 * n]`, the gate in the first half: `[tokens, n]`.

    `activation` is one of ACTIVATIONS; `limit` that of `clamped_swiglu`.
    """
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(tokens, columns)
    if tokens:
        width = power_of_two(columns) if INTERPRETED else min(_WIDTH, power_of_two(columns, 128))
        # Grid axis 1 ends at 65,535, far above the tokens of a step.
        grid = (triton.cdiv(columns, width), tokens)
        _swiglu[grid](
            check_dense("gate_up", gate_up), check_dense("out", out), columns, limit or 0.0,
            ACTIVATION=ACTIVATIONS[activation], WIDTH=width,
        )  # fmt: skip
    return out
