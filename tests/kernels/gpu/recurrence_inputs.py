"""Cases of recurrent kernels: a layer's constants, inputs of rows, and a run beside its meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from kernels.recurrence import DeltaRule, ScanRule, SpaceRule
from kernels.state_pages import StateRuns
from tests.kernels.gpu.paged_states import Pages, based, on_cpu

_Rule = TypeVar("_Rule", DeltaRule, ScanRule, SpaceRule)
CHUNKS = [(0, [(1, 0), (16, 1)]), (-1, [(70, 2)]), (3, []), (3, [(9, -1)]), (4, [(64, 5), (5, -1)])]
"""Goes on in its page and crosses its end; begins, with more than a chunk; padding; aborted; a chunk whose
states are kept, and guesses.
"""
ROWS = 170
"""Rows of the sequences, 165, and some that belong to none."""
ONE_TOKEN = ([0, 1, -1, 4], [2, 1, 3, -1])
"""Pages read and written: the second row goes on in its page, the third begins, the fourth is padding."""


def delta_constants(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, device: torch.device, **more: Any
) -> DeltaRule:
    """Return random constants of a layer."""
    generator = torch.Generator().manual_seed(5)

    def numbers(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator).to(device)

    return DeltaRule(
        key_heads, value_heads, key_dim, value_dim, speed=numbers(value_heads) * 2,
        step_bias=numbers(value_heads) - 3, norm=numbers(value_dim) + 0.5, eps=1e-6, **more,
    )  # fmt: skip


def delta_inputs(
    rule: DeltaRule, rows: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `conv` and `mixed` of so many rows. Keys resemble one another, so that corrections matter."""
    generator = torch.Generator().manual_seed(rows)
    channels = 2 * rule.key_heads * rule.key_dim + rule.value_heads * rule.value_dim
    more = rule.value_heads * rule.value_dim + 2 * rule.value_heads
    conv = torch.randn(rows, channels, generator=generator) + 0.5
    mixed = torch.randn(rows, channels + more, generator=generator).to(dtype)
    return conv.to(device), mixed.to(device)


def space_constants(
    heads: int, head_dim: int, groups: int, state: int, device: torch.device, **more: Any
) -> SpaceRule:
    """Return random constants of a layer."""
    generator = torch.Generator().manual_seed(6)

    def numbers(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator).to(device)

    given = {"norm": numbers(heads * head_dim) + 0.5, "step_bounds": (0.0, float("inf")), **more}
    return SpaceRule(
        heads, head_dim, groups, state, a=-numbers(heads) - 0.1, step_bias=numbers(heads) - 2,
        skip=numbers(heads), eps=1e-6, **given,
    )  # fmt: skip


def space_inputs(
    rule: SpaceRule, rows: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `conv` and `mixed` of so many rows."""
    generator = torch.Generator().manual_seed(rows)
    channels = rule.heads * rule.head_dim + 2 * rule.groups * rule.state
    conv = torch.randn(rows, channels, generator=generator)
    mixed = torch.randn(rows, rule.heads * rule.head_dim + channels + rule.heads, generator=generator)
    return conv.to(device), mixed.to(device, dtype)


def near(dtype: torch.dtype) -> dict[str, float]:
    """Return how near chunks come to their meaning in a model of `dtype` (kernels/gpu/wide_product.py)."""
    exact = dtype == torch.float32
    return {"tolerance": 1e-4, "kept": 2e-5} if exact else {"tolerance": 2e-2, "kept": 4e-3}


def of_cpu(rule: _Rule) -> _Rule:
    """Return the same constants on the CPU."""
    tensors = {
        one.name: value.cpu()
        for one in fields(rule)
        if isinstance(value := getattr(rule, one.name), torch.Tensor)
    }
    return replace(rule, **tensors)


def compare(
    kernel: Callable[..., torch.Tensor],
    meaning: Callable[..., torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor],
    rule: Any,
    width: int,
    pages: Pages,
    runs: StateRuns,
    *,
    tolerance: float,
    kept: float = 2e-5,
    **more: Any,
) -> None:
    """Compare outputs of the rows of `runs` within `tolerance`, and all of their memory within `kept`."""
    conv, mixed = given
    theirs = on_cpu(runs)
    out = torch.full((len(conv), width), torch.nan, device=conv.device, dtype=mixed.dtype)
    expected = out.cpu().clone()
    meaning(conv.cpu().clone(), mixed.cpu(), of_cpu(rule), theirs, pages.first, out=expected)
    ours = based(runs) if runs.offsets is not None else runs
    kernel(conv.clone(), mixed, rule, ours, pages.first, out=out, **more)
    torch.testing.assert_close(pages.memory.cpu(), theirs.pool, atol=kept, rtol=kept, equal_nan=True)
    rows = runs.rows
    torch.testing.assert_close(out[rows].cpu(), expected[rows], atol=tolerance, rtol=tolerance)
    assert not expected[rows].isnan().any()
