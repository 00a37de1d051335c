"""The gated delta rule for one token each of several sequences: a program has a head's matrix in registers.

The meaning is diptych/engine/backends/torch/recurrent (delta_rule.py, gated_delta.py), in float32. The matrix
is read from the page of the token before, decays, is corrected, asked, and written to the token's own page:
once from memory and once to it, which is all that such a step costs. The output's norm and gate are of one
head, and so in the same launch.

A row's bits depend on its own numbers alone: sums run over a head's keys and values in one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import power_of_two
from kernels.gpu.state_tiles import in_pages, load_tile, silu, softplus, store_tile
from kernels.recurrence import DeltaRule
from kernels.state_pages import StateRuns


@triton.jit
def unit_row(x, scale):
    """Return float32 `x [D]` divided by its length, times `scale`."""
    return x * (tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6) * scale)


@triton.jit(do_not_specialize=["read", "written", "starts", "page_blocks"])
def _delta_step(
    conv, mixed, speed, step_bias, norm, out, memory, base, read, written, starts, live, begin, stride,
    page_blocks, conv_stride, mixed_stride, out_stride, gate_at, rate_at, step_at, eps, largest_rate,
    query_scale, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BASED: tl.constexpr, BLOCK_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Advance one value head of one row.

    `conv` is float32 `[S, channels]` (queries, keys, values), `mixed [S, X]` has gates, rates and steps from
    the numbers `gate_at`, `rate_at` and `step_at` of a row on, `out` is `[S, value heads * V]`. `speed` and
    `step_bias` are float32 `[value heads]`, `norm [V]`. States are `[value heads, D, V]` of pages, from
    `memory` to UNIT as `in_pages` has them.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    dims = tl.arange(0, D_PAD)
    lanes = tl.arange(0, V_PAD)
    in_key = dims < D
    in_value = lanes < V
    place = out + row.to(tl.int64) * out_stride + head * V + lanes
    if tl.load(live + row) == 0:
        tl.store(place, tl.zeros([V_PAD], out.dtype.element_ty), mask=in_value)
    else:
        if BASED:
            memory += tl.multiple_of(tl.load(base), UNIT)
        of_row = conv + row.to(tl.int64) * conv_stride
        given = mixed + row.to(tl.int64) * mixed_stride
        key = of_row + (head // SHARE) * D + dims
        q = unit_row(tl.load(key, mask=in_key, other=0.0), query_scale)
        k = unit_row(tl.load(key + KEY_HEADS * D, mask=in_key, other=0.0), 1.0)
        v = tl.load(of_row + 2 * KEY_HEADS * D + head * V + lanes, mask=in_value, other=0.0)
        step = tl.load(given + step_at + head).to(tl.float32) + tl.load(step_bias + head)
        decay = tl.exp(-tl.load(speed + head) * softplus(step))
        rate = largest_rate / (1.0 + tl.exp(-tl.load(given + rate_at + head).to(tl.float32)))

        units = tl.arange(0, V_PAD // UNIT)
        rows_at = head * D + dims
        state = decay * load_tile(
            memory, read + row * page_blocks, tl.load(starts + row), begin, rows_at, in_key, units,
            units < V // UNIT, V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, V_PAD,
        )  # fmt: skip
        correction = (v - tl.sum(k[:, None] * state, axis=0)) * rate
        state += k[:, None] * correction[None, :]
        store_tile(
            state, memory, written + row * page_blocks, begin, rows_at, in_key, units, units < V // UNIT,
            V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, V_PAD,
        )  # fmt: skip
        answer = tl.sum(q[:, None] * state, axis=0)
        answer *= tl.rsqrt(tl.sum(answer * answer, axis=0) / V + eps)
        answer *= tl.load(norm + lanes, mask=in_value, other=0.0).to(tl.float32)
        gate = tl.load(given + gate_at + head * V + lanes, mask=in_value, other=0.0).to(tl.float32)
        tl.store(place, (answer * silu(gate)).to(out.dtype.element_ty), mask=in_value)


def delta_step(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance one token each of the S sequences of `runs` and return their gated outputs in `out [S, value
    heads * V]`.

    `conv` is float32 `[S, channels]`, behind its activation; `mixed [S, X]` what `DeltaShape.projected`
    lists. States are `[value heads, D, V]` from float `first` of a page on.
    """
    width = power_of_two(rule.key_dim) * power_of_two(rule.value_dim)
    _delta_step[(rule.value_heads, runs.sequences)](
        conv, mixed, rule.speed, rule.step_bias, rule.norm, out, conv_stride=conv.stride(0),
        mixed_stride=mixed.stride(0), out_stride=out.stride(0), eps=rule.eps,
        largest_rate=rule.largest_rate, **_columns(rule), **delta_sizes(rule),
        **in_pages(runs, first, rule.value_dim), num_warps=min(16, max(4, width // 2048)),
    )  # fmt: skip
    return out


def _columns(rule: DeltaRule) -> dict[str, int]:
    return dict(zip(("gate_at", "rate_at", "step_at"), rule.columns, strict=True))


def delta_sizes(rule: DeltaRule) -> dict[str, Any]:
    """Return the sizes of a layer, most of which kernels are compiled for."""
    return {
        "query_scale": rule.key_dim**-0.5,
        "KEY_HEADS": rule.key_heads,
        "SHARE": rule.value_heads // rule.key_heads,
        "D": rule.key_dim,
        "D_PAD": power_of_two(rule.key_dim, 16),
        "V": rule.value_dim,
        "V_PAD": power_of_two(rule.value_dim, 16),
    }
