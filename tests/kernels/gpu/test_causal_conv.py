"""Convolutions over states in pages, and counts of pages, against their meanings in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.causal_conv as meaning
import kernels.state_pages as pages_meaning
from kernels.gpu.causal_conv import causal_conv, short_conv
from kernels.gpu.state_pages import begin_states, end_states
from kernels.state_pages import NO_PAGE, StateRuns

BLOCKS, BLOCK_FLOATS, STRIDE, PAGE_BLOCKS, FIRST = 40, 48, 52, 20, 64
"""Blocks with a few floats that pages do not use; a page's states begin within its second block."""
SIZE = 16
"""Tokens of a place."""


def pages_of(rows: int) -> torch.Tensor:
    """Return so many pages of other blocks each, while there are any."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5))
    assert rows * PAGE_BLOCKS <= BLOCKS
    return order[: rows * PAGE_BLOCKS].view(rows, PAGE_BLOCKS).int()


def pool_with(counts: dict[int, int], pages: torch.Tensor) -> torch.Tensor:
    """Return random blocks whose pages have these counts."""
    pool = torch.randn(BLOCKS, STRIDE, generator=torch.Generator().manual_seed(1))
    for page, count in counts.items():
        pool[pages[page, 0], :2] = torch.tensor([count]).view(torch.float32)
    return pool


def decode_runs(start: int, *, crossing: bool) -> StateRuns:
    """Return two rows: one that goes on, and one at its first token, or, where the first one crosses into its
    next page, one that is padding.
    """
    pages = pages_of(2)
    nowhere = torch.full((1, PAGE_BLOCKS), NO_PAGE).int()
    return StateRuns(
        pool_with({0: start}, pages), BLOCK_FLOATS, slice(0, 2), pages[[0, 0]],
        torch.cat([pages[1:], nowhere]) if crossing else pages, torch.tensor([start, 0]).int(),
        torch.zeros(2).int(),
    )  # fmt: skip


def chunk_runs(start: int, count: int, guesses: int = 0) -> StateRuns:
    """Return one chunk of `count` tokens from `start` on over a ring of two pages, before an empty sequence.

    The page that is read is written as well. States behind `guesses` more tokens are kept nowhere.
    """
    pages = pages_of(2)
    first, last = start // SIZE, (start + count - 1) // SIZE
    kept = list(range(max(first, last - 1), last + 1))
    ends = [min((place + 1) * SIZE, start + count) - start for place in kept]
    cuts = len(kept) + bool(guesses)
    count += guesses
    ends += [count] * bool(guesses)
    read = pages[[(start - 1) // SIZE % 2]] if start else pages[[0]]
    nowhere = torch.full((1 + bool(guesses), PAGE_BLOCKS), NO_PAGE)
    written = torch.cat([pages[[place % 2 for place in kept]], nowhere]).int()
    counts = {(start - 1) // SIZE % 2: start} if start else {}
    return StateRuns(
        pool_with(counts, pages), BLOCK_FLOATS, slice(0, count), torch.cat([read, read]), written,
        torch.tensor([start, 0]).int(), torch.zeros(2).int(), torch.tensor([0, count, count]).int(),
        torch.tensor([0, cuts, cuts]).int(), torch.tensor([*ends, 0]).int(), count,
    )  # fmt: skip


def bits(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool as whole numbers on the CPU: no count is not a number, as floats go."""
    return pool.cpu().view(torch.int32)


def on(runs: StateRuns, device: torch.device) -> StateRuns:
    moved: dict[str, Any] = {
        name: value.clone().to(device)
        for name, value in vars(runs).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(runs, **moved)


def compare(runs: StateRuns, device: torch.device, taps: int, dtype: torch.dtype, **how: Any) -> None:
    """Advance the runs by the kernels and by their meaning: the same rows, pages and counts."""
    torch.manual_seed(3)
    rows, channels = runs.rows.stop, 150
    gated = how.pop("gated")
    x = torch.randn(rows, (3 * channels if gated else channels) + 7).to(dtype)[:, 7:]
    weight, bias = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype)
    theirs, ours = on(runs, torch.device("cpu")), on(runs, device)
    pages_meaning.begin_states(theirs)
    begin_states(ours)
    assert torch.equal(ours.live.cpu(), theirs.live)
    assert torch.equal(bits(ours.pool), bits(theirs.pool))
    kind = dtype if gated else torch.float32
    expected = torch.full((rows, channels), 7.0, dtype=kind)
    out = expected.clone().to(device)
    meant, run = (meaning.short_conv, short_conv) if gated else (meaning.causal_conv, causal_conv)
    meant(x, weight, bias, theirs, FIRST, out=expected, **how)
    run(x.to(device), weight.to(device), bias.to(device), ours, FIRST, out=out, **how)
    # The interpreter cuts a product off where a card rounds it to bfloat16.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
    pages_meaning.end_states(theirs, expected)
    end_states(ours, out)
    if dtype == torch.float32 or not gated:
        assert torch.equal(bits(ours.pool), bits(theirs.pool))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("start", "crossing"), [(5, False), (16, True)])
def test_decode_rows(start: int, crossing: bool, gated: bool, device: torch.device) -> None:
    compare(decode_runs(start, crossing=crossing), device, 4, torch.float32, gated=gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 5), (0, 41), (15, 3), (15, 2), (14, 60), (16, 40), (32, 2), (33, 1)],
)
def test_chunks(start: int, count: int, gated: bool, device: torch.device) -> None:
    compare(chunk_runs(start, count), device, 4, torch.float32, gated=gated)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (5, 1), (14, 4), (16, 1)])
def test_guesses_are_computed_and_kept_nowhere(start: int, count: int, device: torch.device) -> None:
    """The pages are those of a chunk without them."""
    pools = []
    for guesses in (0, 3):
        runs = chunk_runs(start, count, guesses)
        compare(runs, device, 4, torch.float32, gated=False)
        ours = on(runs, device)
        x = torch.randn(8, 150, generator=torch.Generator().manual_seed(2))[: count + guesses].to(device)
        begin_states(ours)
        causal_conv(x, torch.ones(150, 4, device=device), None, ours, FIRST, out=torch.empty_like(x))
        end_states(ours, x)
        pools.append(bits(ours.pool))
    assert torch.equal(*pools)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_filters_of_other_lengths_and_bfloat16(taps: int, device: torch.device) -> None:
    compare(chunk_runs(15, 20), device, taps, torch.bfloat16, gated=True)
    compare(decode_runs(5, crossing=False), device, taps, torch.bfloat16, gated=False, silu=True)


def test_states_of_another_count_lose_their_rows_alone(device: torch.device) -> None:
    runs = decode_runs(5, crossing=False)
    for wrong in (replace(runs, starts=runs.starts + torch.tensor([1, 0]).int()), runs):
        ours = on(wrong, device)
        before = bits(ours.pool).clone()
        begin_states(ours)
        x = torch.ones(2, 150, device=device)
        causal_conv(x, torch.ones(150, 4, device=device), None, ours, FIRST, out=x)
        hidden = end_states(ours, torch.ones(2, 33, device=device))
        lost = wrong is not runs
        assert hidden.isnan().any(dim=1).tolist() == [lost, False]
        own, after = runs.read[0].long(), bits(ours.pool)
        assert torch.equal(after[own], before[own]) == lost, "no page of a lost row is written"
        assert not torch.equal(after, before), "the other row's is"


def test_a_page_has_no_count_between_begin_and_end(device: torch.device) -> None:
    ours = on(chunk_runs(15, 20), device)
    assert begin_states(ours).tolist() == [1, 0]
    assert begin_states(ours).tolist() == [0, 0], "what failed in between goes on nowhere"
