"""The gated delta rule of one token a row equals torch's, over states in pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.delta_step import delta_step
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrent_cases import ONE_TOKEN, compare, delta_inputs, delta_rule

SIZES = [(2, 4, 16, 32, 0, 48), (1, 3, 12, 20, 16, 32), (2, 2, 9, 7, 5, 11)]
"""Key heads, value heads, keys, values, first float of the states, floats of a block."""


@pytest.mark.parametrize(("key_heads", "heads", "keys", "values", "begin", "block"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_token(
    key_heads: int, heads: int, keys: int, values: int, begin: int, block: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rule = delta_rule(key_heads, heads, keys, values, device, largest_rate=2.0)
    ours = Pages.make(6, heads * keys * values, begin, block, device)
    given = delta_inputs(rule, 4, device, dtype)
    compare(
        delta_step, recurrent_meanings.delta, given, rule, heads * values, ours, ours.rows(*ONE_TOKEN), 4,
        tolerance=2e-5 if dtype == torch.float32 else 1e-2,
    )  # fmt: skip


def test_another_rate_or_norm_is_seen(device: torch.device) -> None:
    """Were a constant left out, the comparison would have to show it."""
    rule = delta_rule(1, 2, 8, 8, device)
    given = delta_inputs(rule, 4, device)
    for other in (replace(rule, largest_rate=2.0), replace(rule, norm=rule.norm * 1.01)):
        ours = Pages.make(6, 2 * 8 * 8, 0, 32, device)

        def changed(*args: object, other: object = other, **how: object) -> torch.Tensor:
            return recurrent_meanings.delta(*args[:2], other, *args[3:], **how)  # type: ignore[arg-type]

        with pytest.raises(AssertionError):
            compare(
                delta_step, changed, given, rule, 16, ours, ours.rows(*ONE_TOKEN), 4, tolerance=2e-5
            )  # fmt: skip


def test_a_row_has_the_same_bits_beside_others(device: torch.device) -> None:
    rule = delta_rule(2, 4, 16, 16, device)
    conv, mixed = delta_inputs(rule, 5, device)
    pages = Pages.make(10, 4 * 16 * 16, 0, 64, device)
    together, alone = torch.empty(5, 64, device=device), torch.empty(5, 64, device=device)
    delta_step(conv, mixed, rule, pages.pages, pages.rows(range(5), range(5, 10)), out=together)
    for row in range(5):
        at = slice(row, row + 1)
        delta_step(conv[at], mixed[at], rule, pages.pages, pages.rows([row], [-1]), out=alone[at])
    assert torch.equal(together, alone)
