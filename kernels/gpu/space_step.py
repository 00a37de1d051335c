"""Mamba-2 for one token each of several sequences: a program has a head's matrix in registers.

The meaning is diptych/engine/backends/torch/recurrent (state_space.py, mamba2.py), in float32. The matrix is
read from the page of the token before, decays, is added to, and written to the token's own page: once from
memory and once to it. Outputs take the place of inputs in `conv`; their norm is over many heads and so a
launch behind (group_norm.py).

A row's bits depend on its own numbers alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.group_norm import group_norm
from kernels.gpu.launch import power_of_two
from kernels.gpu.state_pages import in_units, load_tile, softplus, store_tile, table_width
from kernels.recurrence import RowPages, SpaceRule, StatePages


@triton.jit
def bounded_step(raw, bias, low, high):
    """Return the steps of float32 `raw [...]`."""
    return tl.minimum(tl.maximum(softplus(raw + bias), low), high)


@triton.jit(do_not_specialize=["table_width"])
def _space_step(
    conv, mixed, decay, step_bias, skip, memory, read, written, begin, stride, table_width, conv_stride,
    mixed_stride, step_at, low, high, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
    P_PAD: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Advance one head of one row.

    `conv` is float32 `[B, channels]` (inputs, then b and c of all groups), `mixed [B, X]` has steps from
    number `step_at` on. `decay`, `step_bias` and `skip` are float32 `[heads]`. States are `[heads, P, M]`.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    channels = tl.arange(0, P_PAD)
    lanes = tl.arange(0, M_PAD)
    in_head = channels < P
    in_state = lanes < M
    of_row = conv + row.to(tl.int64) * conv_stride
    x = tl.load(of_row + head * P + channels, mask=in_head, other=0.0)
    shared = of_row + HEADS * P + (head // (HEADS // GROUPS)) * M + lanes
    b = tl.load(shared, mask=in_state, other=0.0)
    c = tl.load(shared + GROUPS * M, mask=in_state, other=0.0)
    raw = tl.load(mixed + row.to(tl.int64) * mixed_stride + step_at + head).to(tl.float32)
    step = bounded_step(raw, tl.load(step_bias + head), low, high)

    units = tl.arange(0, M_PAD // UNIT)
    rows_at = head * P + channels
    state = tl.exp(step * tl.load(decay + head)) * load_tile(
        memory, read + row * table_width, begin, rows_at, in_head, units, units < M // UNIT, M // UNIT,
        stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
    )  # fmt: skip
    state += (step * x)[:, None] * b[None, :]
    store_tile(
        state, memory, written + row * table_width, begin, rows_at, in_head, units, units < M // UNIT,
        M // UNIT, stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
    )  # fmt: skip
    answer = tl.sum(state * c[None, :], axis=1) + x * tl.load(skip + head)
    tl.store(of_row + head * P + channels, answer, mask=in_head)


def space_step(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    pages: StatePages,
    rows: RowPages,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance one token each of B sequences and return their gated outputs in `out [B, heads * P]`.

    `conv` is float32 `[B, channels]`, behind its activation, whose inputs are overwritten; `mixed [B, X]` what
    `SpaceShape.projected` lists. States are `[heads, P, M]` of `pages`.
    """
    count = len(conv)
    if count == 0:
        return out
    units = in_units(pages, rule.state)
    width = power_of_two(rule.head_dim) * power_of_two(rule.state)
    _space_step[(rule.heads, count)](
        conv, mixed, rule.a, rule.step_bias, rule.skip, pages.memory, rows.read, rows.written,
        units.pop("begin"), units.pop("stride"), table_width(rows.read, rows.written), conv.stride(0),
        mixed.stride(0), step_column(rule), *rule.step_bounds, **space_sizes(rule), **units,
        num_warps=min(16, max(1, width // 2048)),
    )  # fmt: skip
    return gated_answers(conv, mixed, rule, out)


def gated_answers(
    conv: torch.Tensor, mixed: torch.Tensor, rule: SpaceRule, out: torch.Tensor
) -> torch.Tensor:
    """Return the outputs that took the place of inputs in `conv [T, channels]`, gated and normalised."""
    width = rule.heads * rule.head_dim
    # Without a norm a group is what a program holds.
    groups = rule.heads if rule.norm is None else rule.groups
    order = "none" if rule.norm is None else rule.order
    return group_norm(
        conv[:, :width], mixed[:, :width], rule.norm, rule.eps, groups=groups, order=order, out=out
    )


def step_column(rule: SpaceRule) -> int:
    """Return the number of a row of `mixed` at which steps begin."""
    return 2 * rule.heads * rule.head_dim + 2 * rule.groups * rule.state


def space_sizes(rule: SpaceRule) -> dict[str, Any]:
    """Return the sizes of a layer that kernels are compiled for."""
    return {
        "HEADS": rule.heads,
        "GROUPS": rule.groups,
        "P": rule.head_dim,
        "P_PAD": power_of_two(rule.head_dim, 16),
        "M": rule.state,
        "M_PAD": power_of_two(rule.state, 16),
    }
