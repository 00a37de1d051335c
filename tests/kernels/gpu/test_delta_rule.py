"""The gated delta rule over states in pages equals torch's: single tokens, chunks, and their borders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu.delta_rule import delta_rule
from kernels.recurrence import DeltaRule
from tests.forms import FULL, sampled
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrence_inputs import (
    CHUNKS,
    ONE_TOKEN,
    ROWS,
    compare,
    delta_constants,
    delta_inputs,
    near,
)

SIZES = [(2, 4, 16, 32, 0, 48), (1, 3, 12, 20, 16, 32), (2, 2, 9, 7, 5, 11)]
"""Key heads, value heads, keys, values, first float of the states, floats of a block."""
ROW_CASES = sampled(
    [(*sizes, dtype) for sizes in SIZES for dtype in (torch.float32, torch.bfloat16)],
    [(*SIZES[1], torch.bfloat16), (*SIZES[2], torch.float32)],
)
CASES: list[Any] = [
    (1, 1, 16, 20, 0, 48, torch.float32),
    *(pytest.param(*sizes, torch.float32, marks=FULL) for sizes in (*SIZES, (1, 2, 96, 192, 16, 1024))),
    pytest.param(*SIZES[1], torch.bfloat16, marks=FULL),
]


def rooms(rule: DeltaRule, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rooms of chunks, with NaN in them."""
    widths = rule.key_dim, 64
    keys, within = (
        torch.full((rows, rule.value_heads * width), torch.nan, device=device) for width in widths
    )
    return keys, within


@pytest.mark.parametrize(("key_heads", "heads", "keys", "values", "first", "block", "dtype"), ROW_CASES)
def test_rows_of_one_token(
    key_heads: int, heads: int, keys: int, values: int, first: int, block: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rule = delta_constants(key_heads, heads, keys, values, device, largest_rate=2.0)
    pages = Pages.make(6, heads * keys * values, first, block, device)
    compare(
        delta_rule, recurrent_meanings.delta, delta_inputs(rule, 4, device, dtype), rule, heads * values,
        pages, pages.rows(*ONE_TOKEN), tolerance=2e-5 if dtype == torch.float32 else 1e-2,
        rooms=rooms(rule, 4, device),
    )  # fmt: skip


@pytest.mark.parametrize(("key_heads", "heads", "keys", "values", "first", "block", "dtype"), CASES)
def test_chunks_of_several_sequences(
    key_heads: int, heads: int, keys: int, values: int, first: int, block: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rule = delta_constants(key_heads, heads, keys, values, device, largest_rate=2.0)
    pages = Pages.make(8, heads * keys * values, first, block, device)
    compare(
        delta_rule, recurrent_meanings.delta, delta_inputs(rule, ROWS, device, dtype), rule, heads * values,
        pages, pages.chunks(CHUNKS), **near(dtype),
        rooms=rooms(rule, ROWS, device),
    )  # fmt: skip


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("changed", ["rate", "norm", "decay"])
def test_another_constant_is_seen(changed: str, chunks: bool, device: torch.device) -> None:
    """Were a constant left out, the comparison would have to show it."""
    rule = delta_constants(1, 1, 8, 8, device)
    other = {
        "rate": replace(rule, largest_rate=1.1),
        "norm": replace(rule, norm=rule.norm * 1.01),
        "decay": replace(rule, speed=rule.speed * 1.05),
    }[changed]

    def meaning(*args: Any, **how: Any) -> torch.Tensor:
        return recurrent_meanings.delta(*args[:2], other, *args[3:], **how)

    pages = Pages.make(8, 64, 0, 32, device)
    rows = 17 if chunks else 4
    with pytest.raises(AssertionError, match="Tensor-likes"):
        compare(
            delta_rule, meaning, delta_inputs(rule, rows, device), rule, 8, pages,
            pages.chunks([(0, [(17, 1)])]) if chunks else pages.rows(*ONE_TOKEN), tolerance=1e-4,
            rooms=rooms(rule, rows, device),
        )  # fmt: skip


@pytest.mark.parametrize("chunks", [False, True])
def test_a_sequence_has_the_same_bits_beside_others(chunks: bool, device: torch.device) -> None:
    rule = delta_constants(1, 1, 16, 16, device)
    conv, mixed = delta_inputs(rule, 40, device)
    pages = Pages.make(4, 256, 0, 64, device)
    both, one = pages.chunks([(0, [(15, 0)]), (1, [(25, 3)])]), pages.chunks([(1, [(25, 2)])])
    begin = 15
    if not chunks:
        both, one, begin = pages.rows([0, 1], [0, 3]), pages.rows([1], [2]), 1
        conv, mixed = conv[:2], mixed[:2]
    together, alone = (torch.empty(len(conv), 16, device=device) for _ in range(2))
    room = rooms(rule, len(conv), device)
    delta_rule(conv.clone(), mixed, rule, both, 0, rooms=room, out=together)
    delta_rule(conv[begin:].clone(), mixed[begin:], rule, one, 0, rooms=room, out=alone[begin:])
    assert torch.equal(together[begin:], alone[begin:])
    assert torch.equal(pages.page(2, 256), pages.page(3, 256))
