"""Access of kernels to recurrent states in pages of the pool, and the two launches around a step's layers.

The meaning is kernels/state_pages.py. The first launch compares the counts of the pages that are read, the
last one writes those of the pages that were written; between them these have none.

The tables of a run lie anywhere within the arrays of a step: no kernel is compiled for their alignment, which
differs from step to step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two
from kernels.state_pages import StateRuns


@triton.jit
def page_floats(pool, table, at, mask, block_stride, BLOCK_FLOATS: tl.constexpr):
    """Return pointers to the floats `at [...]` of a page where `mask [...]`, and where there is such a block.

    `table` points to the page's blocks, int32; `pool` to block 0, `block_stride` floats from the next.
    """
    number = at // BLOCK_FLOATS
    block = tl.load(table + number, mask=mask, other=-1)
    return pool + block.to(tl.int64) * block_stride + (at - number * BLOCK_FLOATS), mask & (block >= 0)


@triton.jit
def _cuts_of(sequence, cuts, SINGLE: tl.constexpr):
    """Return the first cut of a sequence, and the one behind its last."""
    first, end = sequence, sequence + 1
    if not SINGLE:
        first, end = tl.load(cuts + sequence), tl.load(cuts + sequence + 1)
    return first, end


@triton.jit(do_not_specialize=["read", "written", "starts", "cuts"])
def _begin_states(
    marks, base, read, written, starts, live, cuts, block_stride, PAGE_BLOCKS: tl.constexpr,
    SINGLE: tl.constexpr, BASED: tl.constexpr,
):  # fmt: skip
    """Compare and remove the counts of one sequence; arguments as in `StateRuns`, `marks` its pool as
    int32.
    """
    sequence = tl.program_id(0)
    if BASED:
        marks += tl.load(base)
    first, end = _cuts_of(sequence, cuts, SINGLE)
    start = tl.load(starts + sequence)
    there = tl.load(written + first * PAGE_BLOCKS, mask=end > first, other=-1) >= 0
    page = tl.load(read + sequence * PAGE_BLOCKS, mask=there & (start > 0), other=-1)
    place = marks + page.to(tl.int64) * block_stride
    low = tl.load(place, mask=page >= 0, other=-1)
    high = tl.load(place + 1, mask=page >= 0, other=-1)
    good = there & ((start == 0) | ((low == start) & (high == 0)))
    tl.store(live + sequence, good.to(tl.int32))
    for cut in range(first, end):
        page = tl.load(written + cut * PAGE_BLOCKS)
        place = marks + page.to(tl.int64) * block_stride
        tl.store(place, -1, mask=good & (page >= 0))
        tl.store(place + 1, -1, mask=good & (page >= 0))


@triton.jit(do_not_specialize=["written", "starts", "offsets", "cuts", "ends"])
def _end_states(
    marks, base, written, starts, live, offsets, cuts, ends, hidden, block_stride, width,
    PAGE_BLOCKS: tl.constexpr, SINGLE: tl.constexpr, BASED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the counts of one sequence, or make its rows of `hidden [rows, width]` NaN; arguments as in
    `StateRuns`, `marks` its pool as int32.
    """
    sequence = tl.program_id(0)
    if BASED:
        marks += tl.load(base)
    first, end = _cuts_of(sequence, cuts, SINGLE)
    start, good = tl.load(starts + sequence), tl.load(live + sequence) > 0
    begin, behind = sequence, sequence + 1
    if not SINGLE:
        begin, behind = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    there = tl.load(written + first * PAGE_BLOCKS, mask=end > first, other=-1) >= 0
    for cut in range(first, end):
        page = tl.load(written + cut * PAGE_BLOCKS)
        count = start + 1
        if not SINGLE:
            count = start + tl.load(ends + cut) - begin
        place = marks + page.to(tl.int64) * block_stride
        tl.store(place, count, mask=good & (page >= 0))
        tl.store(place + 1, 0, mask=good & (page >= 0))
    column = tl.arange(0, WIDTH)
    lost = tl.full((WIDTH,), float("nan"), tl.float32).to(hidden.dtype.element_ty)
    for row in range(begin, tl.where(there & (good == 0), behind, begin)):
        tl.store(hidden + row * width + column, lost, mask=column < width)


def page_arguments(runs: StateRuns) -> dict[str, Any]:
    """Return how kernels find pages: `base`, `block_stride`, and the constants of their layout."""
    return {
        "base": runs.base,
        "block_stride": runs.pool.stride(0),
        "PAGE_BLOCKS": runs.page_blocks,
        "SINGLE": runs.offsets is None,
        "BASED": runs.base is not None,
    }


def begin_states(runs: StateRuns) -> torch.Tensor:
    """See kernels/state_pages.py."""
    _begin_states[(runs.sequences,)](
        runs.pool.view(torch.int32),
        read=check_dense("read", runs.read),
        written=check_dense("written", runs.written),
        starts=runs.starts,
        live=runs.live,
        cuts=runs.cuts,
        **page_arguments(runs),
        num_warps=1,
    )
    return runs.live


def end_states(runs: StateRuns, hidden: torch.Tensor) -> torch.Tensor:
    """See kernels/state_pages.py; `hidden [rows, H]` is dense."""
    width = check_dense("hidden", hidden).shape[1]
    _end_states[(runs.sequences,)](
        runs.pool.view(torch.int32),
        written=check_dense("written", runs.written),
        starts=runs.starts,
        live=runs.live,
        offsets=runs.offsets,
        cuts=runs.cuts,
        ends=runs.ends,
        hidden=hidden,
        width=width,
        **page_arguments(runs),
        WIDTH=power_of_two(width),
    )
    return hidden
