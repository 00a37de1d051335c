"""Causal convolutions over sequences with states in pages: one launch for decode rows, two for chunks.

The meaning is kernels/causal_conv.py. Programs of a chunk share out tokens and channels, and those of its
first tokens read the state before. Its states are written by a launch behind it, since a page that is written
may be the one that was read. That launch takes a sequence's cuts from the last to the first: only the first
one's page can be that of the state before while another cut still reads it, as long as a place has K - 1
tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense
from kernels.gpu.state_pages import page_arguments, page_floats
from kernels.state_pages import StateRuns

_CHANNELS = 128
"""Channels of a program."""
_TOKENS = 32
"""Tokens of a program in chunks."""


@triton.jit
def _input(x, row, channel, mask, row_stride, C: tl.constexpr, GATED: tl.constexpr):
    """Return the inputs of rows and channels, float32; GATED: the product of two, rounded as such."""
    place = x + row.to(tl.int64) * row_stride + channel
    found = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        inner = tl.load(place + 2 * C, mask=mask, other=0.0).to(tl.float32)
        found = (found * inner).to(x.dtype.element_ty).to(tl.float32)
    return found


@triton.jit
def _finish(
    x, row, channel, sums, bias, out, mask, row_stride, C: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store what the sums `[..., channels]` of rows become."""
    if BIAS:
        sums += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    if GATED:
        gate = tl.load(x + row.to(tl.int64) * row_stride + C + channel, mask=mask, other=0.0).to(tl.float32)
        sums = gate * sums.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row.to(tl.int64) * C + channel, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["read", "written", "starts"])
def _decode(
    x, weight, bias, out, pool, base, read, written, starts, live, first, row_stride, block_stride,
    C: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_FLOATS: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    BASED: tl.constexpr,
):  # fmt: skip
    """Advance one row and CHANNELS channels; `x` and other arguments as in the launchers."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    good = tl.load(live + row) > 0
    inside = channel < C
    # Conditions of all channels are bounds: the interpreter knows no mask that was made of a scalar.
    mask = channel < tl.where(good, C, 0)
    if BASED:
        pool += tl.load(base)
    old = channel < tl.where(good & (tl.load(starts + row) > 0), C, 0)
    sums = tl.zeros((CHANNELS,), tl.float32)
    # A thread has the same channels throughout: it loads each tap of the page before it stores over it.
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            at = first + tap * C + channel
            place, there = page_floats(pool, read + row * PAGE_BLOCKS, at, old, block_stride, BLOCK_FLOATS)
            seen = tl.load(place, mask=there, other=0.0)
        else:
            seen = _input(x, row, channel, mask, row_stride, C, GATED)
        sums += seen * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            at = first + (tap - 1) * C + channel
            place, there = page_floats(
                pool, written + row * PAGE_BLOCKS, at, mask, block_stride, BLOCK_FLOATS
            )
            tl.store(place, seen, mask=there)
    if good:
        _finish(x, row, channel, sums, bias, out, inside, row_stride, C, GATED, SILU, BIAS)
    else:
        tl.store(out + row * C + channel, tl.zeros((CHANNELS,), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["read", "starts", "offsets"])
def _chunks(
    x, weight, bias, out, pool, base, read, starts, live, offsets, first, row_stride, block_stride,
    C: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_FLOATS: tl.constexpr, PAGE_BLOCKS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    BIAS: tl.constexpr, BASED: tl.constexpr,
):  # fmt: skip
    """Convolve TOKENS tokens of one sequence in CHANNELS channels; no page is written."""
    sequence = tl.program_id(1)
    begin, behind = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    row = (begin + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = (tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = (row < behind) & (channel < C)
    good = tl.load(live + sequence) > 0
    if BASED:
        pool += tl.load(base)
    seen_now = (row < tl.where(good, behind, 0)) & (channel < C)
    old = seen_now & (channel < tl.where(tl.load(starts + sequence) > 0, C, 0))
    sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + (tap - TAPS + 1)
        seen = _input(x, source, channel, seen_now & (source >= begin), row_stride, C, GATED)
        if tap < TAPS - 1:
            at = first + (source - begin + TAPS - 1) * C + channel
            place, there = page_floats(
                pool, read + sequence * PAGE_BLOCKS, at, old & (source < begin), block_stride, BLOCK_FLOATS
            )
            seen += tl.load(place, mask=there, other=0.0)
        sums += seen * tl.load(weight + channel * TAPS + tap, mask=channel < C, other=0.0).to(tl.float32)
    if good:
        _finish(x, row, channel, sums, bias, out, mask, row_stride, C, GATED, SILU, BIAS)
    else:
        tl.store(
            out + row.to(tl.int64) * C + channel, tl.zeros_like(sums).to(out.dtype.element_ty), mask=mask
        )


@triton.jit(do_not_specialize=["read", "written", "starts", "offsets", "cuts", "ends"])
def _keep(
    x, pool, base, read, written, starts, live, offsets, cuts, ends, first, row_stride, block_stride,
    C: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_FLOATS: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, GATED: tl.constexpr, BASED: tl.constexpr,
):  # fmt: skip
    """Write the states behind the cuts of one sequence in CHANNELS channels."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    width = tl.where(tl.load(live + sequence) > 0, C, 0)
    old = tl.where(tl.load(starts + sequence) > 0, width, 0)
    if BASED:
        pool += tl.load(base)
    begin = tl.load(offsets + sequence)
    low, high = tl.load(cuts + sequence), tl.load(cuts + sequence + 1)
    for number in range(high - low):
        cut = high - 1 - number
        end = tl.load(ends + cut)
        for tap in tl.static_range(TAPS - 1):
            source = end + (tap - TAPS + 1)
            new = channel < tl.where(source >= begin, width, 0)
            seen = _input(x, source, channel, new, row_stride, C, GATED)
            at = first + (source - begin + TAPS - 1) * C + channel
            before = channel < tl.where(source < begin, old, 0)
            place, there = page_floats(
                pool, read + sequence * PAGE_BLOCKS, at, before, block_stride, BLOCK_FLOATS
            )
            seen += tl.load(place, mask=there, other=0.0)
            at = first + tap * C + channel
            place, there = page_floats(
                pool, written + cut * PAGE_BLOCKS, at, channel < width, block_stride, BLOCK_FLOATS
            )
            tl.store(place, seen, mask=there)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: StateRuns,
    first: int,
    *,
    silu: bool = False,
    out: torch.Tensor,
) -> torch.Tensor:
    """See kernels/causal_conv.py; rows of `x [rows, C]` may lie apart, and `out` may be of another type."""
    return _launch(x, weight, bias, runs, first, out, gated=False, silu=silu)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """See kernels/causal_conv.py; rows of `x [rows, 3 * W]` may lie apart."""
    return _launch(x, weight, bias, runs, first, out, gated=True, silu=False)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: StateRuns,
    first: int,
    out: torch.Tensor,
    *,
    gated: bool,
    silu: bool,
) -> torch.Tensor:
    channels, taps = check_dense("weight", weight).shape
    check_dense("out", out)
    pages = page_arguments(runs)
    single = pages.pop("SINGLE")
    sizes = {"C": channels, "TAPS": taps, "CHANNELS": _CHANNELS, "BLOCK_FLOATS": runs.block_floats}
    of_state = {
        **pages, **sizes, "pool": runs.pool, "read": runs.read, "starts": runs.starts, "live": runs.live,
        "first": first, "row_stride": x.stride(0), "GATED": gated,
    }  # fmt: skip
    of_rows = {"weight": weight, "bias": bias, "out": out, "SILU": silu, "BIAS": bias is not None}
    parts = triton.cdiv(channels, _CHANNELS)
    if single:
        _decode[(runs.sequences, parts)](x, written=runs.written, **of_state, **of_rows)
        return out
    tiles = triton.cdiv(runs.max_tokens, _TOKENS)
    _chunks[(tiles, runs.sequences, parts)](
        x, offsets=runs.offsets, TOKENS=_TOKENS, **of_state, **of_rows, num_warps=4
    )
    if taps > 1:
        _keep[(runs.sequences, parts)](
            x, written=runs.written, offsets=runs.offsets, cuts=runs.cuts, ends=runs.ends, **of_state
        )
    return out
