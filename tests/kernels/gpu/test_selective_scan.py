"""The selective scan over states in pages equals torch's: rows, chunks, and however a text is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.selective_scan import selective_scan
from kernels.recurrence import ScanRule
from kernels.state_pages import StateRuns
from tests.forms import sampled
from tests.kernels import recurrent_meanings
from tests.kernels.gpu.paged_states import Pages, based, on_cpu
from tests.kernels.gpu.recurrence_inputs import ONE_TOKEN, of_cpu

CHUNKS = [(0, [(1, 0), (9, 1)]), (-1, [(19, 2)]), (3, []), (3, [(4, -1)]), (4, [(8, 5), (5, -1)])]
SIZES = [(24, 16, 0, 48), (9, 5, 3, 7), (40, 12, 16, 32)]
"""Channels, numbers of a channel, first float of the states, floats of a block."""


def constants(width: int, state: int, device: torch.device) -> ScanRule:
    generator = torch.Generator().manual_seed(8)
    a = -torch.rand(width, state, generator=generator) - 0.1
    bias, skip = torch.rand(width, generator=generator) - 2, torch.rand(width, generator=generator)
    return ScanRule(width, state, a.to(device), bias.to(device), skip.to(device))


def inputs(rows: int, rule: ScanRule, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return x, steps, b, c and gates, of rows that lie apart."""
    generator, device = torch.Generator().manual_seed(rows), rule.a.device
    read = torch.randn(rows, 3 + 2 * rule.state, generator=generator).to(device)[:, 3:]
    gates = torch.randn(rows, 2 * rule.width, generator=generator).to(device, dtype)[:, rule.width :]
    x, steps = (torch.randn(rows, rule.width, generator=generator).to(device) for _ in range(2))
    return [x, steps.to(dtype), *read.chunk(2, dim=1), gates]


def run(given: list[torch.Tensor], rule: ScanRule, runs: StateRuns, first: int) -> torch.Tensor:
    out = torch.full_like(given[1], 7.0)
    return selective_scan(*given, rule, runs, first, out=out)


@pytest.mark.parametrize(
    ("width", "state", "first", "block", "dtype"),
    sampled(
        [(*sizes, dtype) for sizes in SIZES for dtype in (torch.float32, torch.bfloat16)],
        [(*SIZES[0], torch.bfloat16), (*SIZES[1], torch.float32)],
    ),
)
@pytest.mark.parametrize("single", [True, False])
def test_states_and_outputs(
    width: int, state: int, first: int, block: int, dtype: torch.dtype, single: bool, device: torch.device
) -> None:
    rule, pages = constants(width, state, device), Pages.make(8, width * state, first, block, device)
    runs = pages.rows(*ONE_TOKEN) if single else pages.chunks(CHUNKS)
    given, theirs = inputs(4 if single else 48, rule, dtype), on_cpu(runs)
    got = run(given, rule, runs if single else based(runs), first)
    expected = torch.full(given[1].shape, 7.0, dtype=dtype)
    recurrent_meanings.scan(*(one.cpu() for one in given), of_cpu(rule), theirs, first, out=expected)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pages.memory.cpu(), theirs.pool, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("changed", ["a", "step_bias", "skip"])
def test_another_constant_is_seen(changed: str, device: torch.device) -> None:
    rule, pages = constants(8, 4, device), Pages.make(2, 32, 0, 48, device)
    given, runs = inputs(9, rule, torch.float32), pages.chunks([(0, [(9, 1)])])
    first = run(given, rule, runs, 0)
    getattr(rule, changed).mul_(1.05)
    assert (first - run(given, rule, runs, 0)).abs().max() > 1e-3


def test_a_row_has_the_same_bits_however_its_text_is_cut(device: torch.device) -> None:
    rule, pages = constants(24, 16, device), Pages.make(4, 24 * 16, 0, 48, device)
    given = inputs(12, rule, torch.float32)

    def part(begin: int, end: int, runs: StateRuns) -> torch.Tensor:
        return run([one[begin:end] for one in given], rule, runs, 0)

    whole = part(0, 12, pages.chunks([(0, [(12, 1)])]))
    cut: list[Any] = [part(0, 10, pages.chunks([(0, [(3, -1), (7, 2)])]))]
    cut += [part(row, row + 1, pages.rows([2], [2])) for row in (10, 11)]
    assert torch.equal(whole, torch.cat(cut))
    other = part(0, 12, pages.chunks([(3, [(12, 2)])]))
    assert not torch.equal(whole, other), "the state before matters"
