"""Mamba-2 over states in pages equals torch's: single tokens, chunks, and their borders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu.state_space import state_space
from tests.forms import FULL, sampled
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrence_inputs import (
    CHUNKS,
    ONE_TOKEN,
    ROWS,
    compare,
    near,
    space_constants,
    space_inputs,
)

SIZES: list[tuple[Any, ...]] = [
    (4, 16, 1, 32, 0, 48, {}),
    (6, 12, 2, 20, 16, 32, {"order": "before_gate", "step_bounds": (0.1, 0.2)}),
    (3, 5, 3, 7, 5, 11, {"norm": None, "order": "none"}),
]
"""Heads, channels of a head, groups, numbers of a channel, first float of the states, floats of a block."""
NAMES = ("heads", "channels", "groups", "numbers", "first", "block", "more")
ROW_CASES = sampled(
    [(*sizes, dtype) for sizes in SIZES for dtype in (torch.float32, torch.bfloat16)],
    [(*SIZES[1], torch.bfloat16), (*SIZES[2], torch.float32)],
)
CASES: list[Any] = [
    (2, 16, 1, 32, 0, 48, {}, torch.float32),
    pytest.param(*SIZES[1], torch.bfloat16, marks=FULL),
    pytest.param(*SIZES[2], torch.float32, marks=FULL),
    pytest.param(2, 64, 1, 128, 16, 1024, {}, torch.float32, marks=FULL),
]


@pytest.mark.parametrize((*NAMES, "dtype"), ROW_CASES)
def test_rows_of_one_token(
    heads: int, channels: int, groups: int, numbers: int, first: int, block: int, more: dict[str, Any],
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    rule = space_constants(heads, channels, groups, numbers, device, **more)
    pages = Pages.make(6, heads * channels * numbers, first, block, device)
    compare(
        state_space, recurrent_meanings.space, space_inputs(rule, 4, device, dtype), rule, heads * channels,
        pages, pages.rows(*ONE_TOKEN), tolerance=2e-5 if dtype == torch.float32 else 1e-2,
    )  # fmt: skip


@pytest.mark.parametrize((*NAMES, "dtype"), CASES)
def test_chunks_of_several_sequences(
    heads: int, channels: int, groups: int, numbers: int, first: int, block: int, more: dict[str, Any],
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    rule = space_constants(heads, channels, groups, numbers, device, **more)
    pages = Pages.make(8, heads * channels * numbers, first, block, device)
    compare(
        state_space, recurrent_meanings.space, space_inputs(rule, ROWS, device, dtype), rule,
        heads * channels, pages, pages.chunks(CHUNKS), **near(dtype),
    )  # fmt: skip


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("changed", ["skip", "norm", "a", "step_bias"])
def test_another_constant_is_seen(changed: str, chunks: bool, device: torch.device) -> None:
    """Were a constant left out, the comparison would have to show it."""
    rule = space_constants(2, 8, 1, 8, device)
    other = replace(rule, **{changed: getattr(rule, changed) * 1.05})

    def meaning(*args: Any, **how: Any) -> torch.Tensor:
        return recurrent_meanings.space(*args[:2], other, *args[3:], **how)

    pages = Pages.make(8, 128, 0, 32, device)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        compare(
            state_space, meaning, space_inputs(rule, 17 if chunks else 4, device), rule, 16, pages,
            pages.chunks([(0, [(17, 1)])]) if chunks else pages.rows(*ONE_TOKEN), tolerance=1e-4,
        )  # fmt: skip


def test_small_steps_keep_their_digits(device: torch.device) -> None:
    """`log(1 + exp(x))` as it stands has three digits at x = -10, and none at -17."""
    rule = space_constants(2, 4, 1, 8, device)
    rule.step_bias.copy_(torch.tensor([-10.0, -17.0]))
    pages = Pages.make(1, 2 * 4 * 8, 0, 16, device)
    conv, mixed = space_inputs(rule, 1, device)
    mixed[:, -2:] = 0
    out = torch.empty(1, 8, device=device)
    state_space(conv.clone(), mixed, rule, pages.rows([-1], [0]), 0, out=out)
    steps = torch.nn.functional.softplus(rule.step_bias.double().cpu())
    x, b = conv[0, :8].view(2, 4).double().cpu(), conv[0, 8:16].double().cpu()
    expected = (steps[:, None] * x)[:, :, None] * b
    torch.testing.assert_close(pages.page(0, 64).view(2, 4, 8).double().cpu(), expected, rtol=3e-6, atol=0)
