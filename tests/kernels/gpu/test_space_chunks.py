"""Mamba-2 of many tokens equals torch's: several sequences, borders of chunks and pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.space_chunks import space_chunks
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrent_cases import PIECES, ROWS, compare, space_inputs, space_rule

SIZES: list[Any] = [
    (2, 16, 1, 32, 0, 48, {}, torch.float32),
    (6, 12, 2, 20, 16, 32, {"order": "before_gate", "step_bounds": (0.1, 0.2)}, torch.bfloat16),
    pytest.param(3, 5, 3, 7, 5, 11, {"norm": None, "order": "none"}, torch.float32, marks=pytest.mark.full),
    pytest.param(4, 64, 1, 128, 16, 1024, {}, torch.float32, marks=pytest.mark.full),
]
"""Heads, channels of a head, groups, numbers of a channel, first float of the states, floats of a block."""


@pytest.mark.parametrize(
    ("heads", "channels", "groups", "numbers", "begin", "block", "more", "dtype"), SIZES
)
def test_pieces_of_several_sequences(
    heads: int, channels: int, groups: int, numbers: int, begin: int, block: int, more: dict[str, Any],
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    rule = space_rule(heads, channels, groups, numbers, device, **more)
    ours = Pages.make(8, heads * channels * numbers, begin, block, device)
    compare(
        space_chunks, recurrent_meanings.space, space_inputs(rule, ROWS, device, dtype), rule,
        heads * channels, ours, ours.pieces(PIECES), 156, tolerance=1e-4 if dtype == torch.float32 else 2e-2,
    )  # fmt: skip


def test_a_state_too_many_or_too_few_is_seen(device: torch.device) -> None:
    """A meaning whose sequences begin one page further must not pass."""
    rule = space_rule(2, 8, 1, 16, device)
    ours = Pages.make(8, 2 * 8 * 16, 0, 48, device)
    shifted = [(page if page < 1 else page - 1, pieces) for page, pieces in PIECES]

    def wrong(*args: Any, **how: Any) -> torch.Tensor:
        return recurrent_meanings.space(*args[:4], ours.pieces(shifted), **how)

    with pytest.raises(AssertionError):
        compare(
            space_chunks, wrong, space_inputs(rule, ROWS, device), rule, 16, ours, ours.pieces(PIECES), 156,
            tolerance=1e-4,
        )  # fmt: skip
