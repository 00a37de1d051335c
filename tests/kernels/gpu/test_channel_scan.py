"""The selective scan over states in pages equals torch's: rows, pieces, and however a text is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.channel_scan import channel_scan
from kernels.recurrence import RowPages, ScanRule, StatePages
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages, on_cpu
from tests.kernels.gpu.recurrent_cases import ONE_TOKEN

PIECES = [(0, [(1, 0), (9, 1)]), (-1, [(19, 2)]), (3, []), (4, [(0, 6), (8, -1), (5, 5)])]
SIZES = [(24, 16, 0, 48), (9, 5, 3, 7), (40, 12, 16, 32)]
"""Channels, numbers of a channel, first float of the states, floats of a block."""


def rule_of(width: int, state: int) -> ScanRule:
    generator = torch.Generator().manual_seed(8)
    a = -torch.rand(width, state, generator=generator) - 0.1
    return ScanRule(width, state, a, torch.rand(width, generator=generator) - 2, torch.rand(width))


def inputs(rows: int, width: int, state: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return x, steps, b, c and gates, of rows that lie apart."""
    generator = torch.Generator().manual_seed(rows)
    read = torch.randn(rows, 3 + 2 * state, generator=generator)
    gates = torch.randn(rows, 2 * width, generator=generator).to(dtype)[:, width:]
    x, steps = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return [x, steps.to(dtype), read[:, 3 : 3 + state], read[:, 3 + state :], gates]


def run(
    given: list[torch.Tensor], rule: ScanRule, pages: StatePages, rows: Any, device: torch.device
) -> torch.Tensor:
    kept = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in vars(rule).items()}
    out = torch.full(given[0].shape, 7.0, dtype=given[1].dtype, device=device)
    return channel_scan(*(one.to(device) for one in given), ScanRule(**kept), pages, rows, out=out)


@pytest.mark.parametrize(("width", "state", "begin", "block"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("single", [True, False])
def test_states_and_outputs(
    width: int, state: int, begin: int, block: int, dtype: torch.dtype, single: bool, device: torch.device
) -> None:
    rule, ours = rule_of(width, state), Pages.make(8, width * state, begin, block, device)
    theirs = ours.twin()
    rows = ours.rows(*ONE_TOKEN) if single else ours.pieces(PIECES)
    given = inputs(4 if single else 45, width, state, dtype)
    got = run(given, rule, ours.pages, rows, device)
    expected = torch.full(given[0].shape, 7.0, dtype=dtype)
    recurrent_meanings.scan(*given, rule, theirs.pages, on_cpu(rows), out=expected)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        ours.pages.memory.cpu(), theirs.pages.memory, atol=2e-5, rtol=2e-5, equal_nan=True
    )


def test_a_row_has_the_same_bits_however_its_text_is_cut(device: torch.device) -> None:
    rule, pages = rule_of(24, 16), Pages.make(3, 24 * 16, 0, 48, device)
    given = inputs(12, 24, 16, torch.float32)
    whole = run(given, rule, pages.pages, pages.pieces([(0, [(12, 1)])]), device)
    cut = [run([one[:10] for one in given], rule, pages.pages, pages.pieces([(0, [(3, -1), (7, 2)])]), device)]
    for row in (10, 11):
        step: RowPages = pages.rows([2], [2])
        cut.append(run([one[row : row + 1] for one in given], rule, pages.pages, step, device))
    assert torch.equal(whole, torch.cat(cut))
    other = run([one[:10] for one in given], rule, pages.pages, pages.pieces([(1, [(10, -1)])]), device)
    assert not torch.equal(whole[:10], other), "the state before matters"
