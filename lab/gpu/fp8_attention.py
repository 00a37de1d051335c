"""Prefill attention with products of FP8, which is off by default: its speed beside 16 bits, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import triton_operators
from diptych.engine.dtype import kept_scales
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from kernels.fp8_cache import DTYPE
from lab.gpu.paged_case import HEAD_DIM, HEADS, KV_HEADS, paged_case, random_query
from lab.gpu.section import Context, Figure, Unmeasured, figure
from lab.gpu.timing import measure

_LARGEST_ERROR = 0.1
"""Distance from products of 16 bits over the norm: queries and weights have three places."""


def fp8_prefill_figure(context: Context, section: str, device: torch.device, tokens: int) -> Iterator[Figure]:
    """Yield the rate of a prompt of `tokens` with products of FP8, beside those of 16 bits over the same
    cache in FP8 and over one in bfloat16; nothing on a card that has none.

    Raises Unmeasured where both results differ by more than rounding.
    """
    from kernels.gpu.fp8_prefill import fp8_prefill, lacks_fp8
    from kernels.gpu.paged_prefill import paged_prefill

    name = f"prefill, {tokens} tokens, products of FP8"
    context.say(name)
    if (why := lacks_fp8(device, HEAD_DIM)) is not None:
        context.say(why)
        return
    case, query = paged_case(1, tokens, device), random_query(tokens, device)
    blocks, scales = case.blocks.to(DTYPE), torch.full((1, 2, KV_HEADS), 0.5, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    rule: dict[str, Any] = {"max_tokens": tokens, "context_tokens": tokens, "out": torch.empty_like(query)}
    works = {
        "FP8": partial(fp8_prefill, query, blocks, 0, case.tables, starts, offsets, scales=scales, **rule),
        "16 bits": partial(
            paged_prefill, query, blocks, 0, case.tables, starts, offsets, scales=scales, **rule
        ),
        "bf16 cache": partial(paged_prefill, query, case.blocks, 0, case.tables, starts, offsets, **rule),
    }  # fmt: skip
    got, right = (works[one]().float().clone() for one in ("FP8", "16 bits"))
    error = float((got - right).norm() / right.norm())
    if not error < _LARGEST_ERROR:
        raise Unmeasured(f"{name}: differs from products of 16 bits by {error:.3g}")
    times = measure(context, works, rounds=20)
    mine = times["FP8"].median_s
    rate = 2.0 * tokens * tokens * HEADS * HEAD_DIM / mine
    yield figure(
        section, name, rate / 1e12, "TFLOP/s", against="16 bits, the same cache",
        ratio=times["16 bits"].median_s / mine,
        note=f"{mine * 1e6:.0f} µs, with a cache in bf16 {times['bf16 cache'].median_s * 1e6:.0f} µs, "
        f"error {error:.3g}, {times['FP8'].note()}",
    )  # fmt: skip


def attention_steps(shape: ModelShape, weights: Weights, device: torch.device) -> Sequence[TritonBackend]:
    """Return two steps over a cache in FP8: attention of prompts in 16 bits, and in FP8."""
    from kernels.gpu.fp8_prefill import fp8_prefill

    scales, plain = kept_scales("fp8", shape, None), triton_operators()
    return [
        TritonBackend(shape, weights, device, operators, scales)
        for operators in (plain, replace(plain, paged_prefill=fp8_prefill))
    ]
