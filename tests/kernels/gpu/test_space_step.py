"""Mamba-2 of one token a row equals torch's, over states in pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.space_step import space_step
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrent_cases import ONE_TOKEN, compare, space_inputs, space_rule

SIZES: list[tuple[Any, ...]] = [
    (4, 16, 1, 32, 0, 48, {}),
    (6, 12, 2, 20, 16, 32, {"order": "before_gate", "step_bounds": (0.2, 0.3)}),
    (3, 5, 3, 7, 5, 11, {"norm": None, "order": "none"}),
]
"""Heads, channels of a head, groups, numbers of a channel, first float of the states, floats of a block."""


@pytest.mark.parametrize(("heads", "channels", "groups", "numbers", "begin", "block", "more"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_token(
    heads: int, channels: int, groups: int, numbers: int, begin: int, block: int, more: dict[str, Any],
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    rule = space_rule(heads, channels, groups, numbers, device, **more)
    ours = Pages.make(6, heads * channels * numbers, begin, block, device)
    compare(
        space_step, recurrent_meanings.space, space_inputs(rule, 4, device, dtype), rule, heads * channels,
        ours, ours.rows(*ONE_TOKEN), 4, tolerance=2e-5 if dtype == torch.float32 else 1e-2,
    )  # fmt: skip


def test_small_steps_keep_their_digits(device: torch.device) -> None:
    """`log(1 + exp(x))` as it stands has three digits at x = -10, and none at -17."""
    rule = space_rule(2, 4, 1, 8, device)
    rule.step_bias.copy_(torch.tensor([-10.0, -17.0]))
    ours = Pages.make(6, 2 * 4 * 8, 0, 16, device)
    rows = ours.rows([-1], [0])
    conv, mixed = space_inputs(rule, 1, device)
    mixed[:, -2:] = 0
    space_step(conv.clone(), mixed, rule, ours.pages, rows, out=torch.empty(1, 8, device=device))
    steps = torch.nn.functional.softplus(rule.step_bias.double().cpu())
    x, b = conv[0, :8].view(2, 4).double().cpu(), conv[0, 8:16].double().cpu()
    expected = (steps[:, None] * x)[:, :, None] * b
    at = torch.arange(64)
    table = ours.tables[0].long().cpu()
    found = ours.pages.memory.cpu()[table[at // 16], at % 16].view(2, 4, 8)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)
