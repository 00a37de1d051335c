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
from kernels.gpu.state_tiles import in_pages, load_tile, softplus, store_tile
from kernels.recurrence import SpaceRule
from kernels.state_pages import StateRuns


@triton.jit
def bounded_step(raw, bias, low, high):
    """Return the steps of float32 `raw [...]`."""
    return tl.minimum(tl.maximum(softplus(raw + bias), low), high)


@triton.jit(do_not_specialize=["read", "written", "starts", "page_blocks"])
def _space_step(
    conv, mixed, decay, step_bias, skip, memory, base, read, written, starts, live, begin, stride,
    page_blocks, conv_stride, mixed_stride, step_at, low, high, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    P: tl.constexpr, P_PAD: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, BASED: tl.constexpr,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Advance one head of one row.

    `conv` is float32 `[S, channels]` (inputs, then b and c of all groups), `mixed [S, X]` has steps from
    number `step_at` on. `decay`, `step_bias` and `skip` are float32 `[heads]`. States are `[heads, P, M]` of
    pages, from `memory` to UNIT as `in_pages` has them.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    channels = tl.arange(0, P_PAD)
    lanes = tl.arange(0, M_PAD)
    in_head = channels < P
    in_state = lanes < M
    of_row = conv + row.to(tl.int64) * conv_stride
    place = of_row + head * P + channels
    if tl.load(live + row) == 0:
        tl.store(place, tl.zeros([P_PAD], tl.float32), mask=in_head)
    else:
        if BASED:
            memory += tl.multiple_of(tl.load(base), UNIT)
        x = tl.load(place, mask=in_head, other=0.0)
        shared = of_row + HEADS * P + (head // (HEADS // GROUPS)) * M + lanes
        b = tl.load(shared, mask=in_state, other=0.0)
        c = tl.load(shared + GROUPS * M, mask=in_state, other=0.0)
        raw = tl.load(mixed + row.to(tl.int64) * mixed_stride + step_at + head).to(tl.float32)
        step = bounded_step(raw, tl.load(step_bias + head), low, high)

        units = tl.arange(0, M_PAD // UNIT)
        rows_at = head * P + channels
        state = tl.exp(step * tl.load(decay + head)) * load_tile(
            memory, read + row * page_blocks, tl.load(starts + row), begin, rows_at, in_head, units,
            units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
        )  # fmt: skip
        state += (step * x)[:, None] * b[None, :]
        store_tile(
            state, memory, written + row * page_blocks, begin, rows_at, in_head, units, units < M // UNIT,
            M // UNIT, stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
        )  # fmt: skip
        answer = tl.sum(state * c[None, :], axis=1) + x * tl.load(skip + head)
        # Another thread may have read the input in whose place this goes.
        tl.debug_barrier()
        tl.store(place, answer, mask=in_head)


def space_step(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance one token each of the S sequences of `runs` and return their gated outputs in `out [S, heads *
    P]`.

    `conv` is float32 `[S, channels]`, behind its activation, whose inputs are overwritten; `mixed [S, X]`
    what `SpaceShape.projected` lists. States are `[heads, P, M]` from float `first` of a page on.
    """
    width = power_of_two(rule.head_dim) * power_of_two(rule.state)
    low, high = rule.step_bounds
    _space_step[(rule.heads, runs.sequences)](
        conv, mixed, rule.a, rule.step_bias, rule.skip, conv_stride=conv.stride(0),
        mixed_stride=mixed.stride(0), step_at=rule.step_column, low=low, high=high, **space_sizes(rule),
        **in_pages(runs, first, rule.state), num_warps=min(16, max(4, width // 2048)),
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
