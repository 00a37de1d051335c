"""Causal convolutions of a step over sequences with states in pages, in torch: the meaning of the kernels.

C channels, each with a filter of K taps over a token and the few before it. A sequence's state is its last
K - 1 inputs, float32 `[K - 1, C]`, the oldest first; zeros before its first token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.state_pages import StatePool, StateRuns


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: StateRuns,
    first: int,
    *,
    silu: bool = False,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the convolution of the run's rows `x [rows, C]` into `out [rows, C]`, and return it.

    Args:
        weight: `[C, K]`, the oldest token's tap first.
        bias: `[C]`, or None.
        first: float of a page at which the state `[K - 1, C]` begins.
        silu: apply SiLU to the sums.

    Sums are float32, rounded once. Rows of sequences that are not computed are zeros.
    """
    pool, taps, (rows, channels) = StatePool(runs), weight.shape[1], x.shape
    out[:rows] = 0
    for sequence in range(runs.sequences):
        if not (stretches := pool.computed(sequence)):
            continue
        begin, end = stretches[0].rows.start, stretches[-1].rows.stop
        before = pool.before(sequence, first, (taps - 1) * channels).view(taps - 1, channels)
        seen = torch.cat([before, x[begin:end].float()])
        sums = seen[: end - begin] * weight[:, 0].float()
        for tap in range(1, taps):
            sums.addcmul_(seen[tap : tap + end - begin], weight[:, tap].float())
        sums = sums if bias is None else sums + bias.float()
        out[begin:end] = functional.silu(sums) if silu else sums
        for stretch in stretches:
            behind = stretch.rows.stop - begin
            pool.keep(stretch.page, first, seen[behind : behind + taps - 1])
    return out


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write LFM2's gated convolution `C * conv(B * x)` of rows `x [rows, 3 * W]`, which are B, C and x, into
    `out [rows, W]`, and return it; other arguments as those of `causal_conv`.
    """
    before, after, inner = x.chunk(3, dim=-1)
    found = causal_conv(before * inner, weight, bias, runs, first, out=torch.empty_like(inner))
    return out.copy_(after * found)
