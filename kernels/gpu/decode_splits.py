"""The splits of a row's context in decode attention, and the pass that joins their results.

The first pass, kernels/gpu/paged_decode.py, computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import power_of_two
from kernels.gpu.scores import LOG2_E_F32

SHORT_CONTEXT, MIDDLE_CONTEXT = 2048, 4095
"""Tokens. Up to here splits are shorter, so that one young sequence fills more of the device; from 4,096 on
a sequence has eight long ones or more a KV head.
"""
SHORT_SPLIT, MIDDLE_SPLIT, LONG_SPLIT = 128, 256, 512
"""Tokens of a split. Of a long one, the partial result in float32 is under 2% of the bytes read for it."""
_SHORT_CONTEXT, _MIDDLE_CONTEXT = tl.constexpr(SHORT_CONTEXT), tl.constexpr(MIDDLE_CONTEXT)
_SHORT_SPLIT, _MIDDLE_SPLIT = tl.constexpr(SHORT_SPLIT), tl.constexpr(MIDDLE_SPLIT)
_LONG_SPLIT = tl.constexpr(LONG_SPLIT)
_JOINED = 32
"""Splits that the second pass adds at a time."""


@dataclass(frozen=True)
class DecodeScratch:
    """Partial results of all splits, float32: allocated once, used by every layer and step."""

    mixed: torch.Tensor
    """`[rows, heads, splits, head_dim]`, not yet divided by the sums."""
    peaks: torch.Tensor
    """`[rows, heads, splits]`: the largest score of each split, times log2(e)."""
    sums: torch.Tensor
    """`[rows, heads, splits]`."""


def max_splits(max_tokens: int) -> int:
    """Return the most splits that a context of up to `max_tokens` can have."""
    return max(
        1,
        -(-min(max_tokens, SHORT_CONTEXT) // SHORT_SPLIT),
        -(-min(max_tokens, MIDDLE_CONTEXT) // MIDDLE_SPLIT),
        -(-max_tokens // LONG_SPLIT),
    )


def make_scratch(
    rows: int, heads: int, head_dim: int, max_tokens: int, device: torch.device
) -> DecodeScratch:
    """Allocate scratch for up to `rows` rows with contexts of up to `max_tokens`."""
    splits = max_splits(max_tokens)
    return DecodeScratch(
        torch.empty(rows, heads, splits, head_dim, device=device),
        torch.empty(rows, heads, splits, device=device),
        torch.empty(rows, heads, splits, device=device),
    )


@triton.jit
def first_read(lengths, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where reading begins, in tokens `[...]`: the start of the first visible position's block."""
    first = lengths * 0
    if WINDOW > 0:
        first = tl.maximum(lengths - WINDOW, 0) // BLOCK_SIZE * BLOCK_SIZE
    return first


@triton.jit
def split_size(tokens):
    """Return the tokens of each split of a context of `tokens [...]`: by its own length alone."""
    longer = tl.where(tokens <= _MIDDLE_CONTEXT, _MIDDLE_SPLIT, _LONG_SPLIT)
    return tl.where(tokens <= _SHORT_CONTEXT, _SHORT_SPLIT, longer)


@triton.jit(do_not_specialize=["lengths", "scratch_splits"])
def _join(
    lengths, sinks, mixed, peaks, sums, out, scratch_splits,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Join the splits of one head of one row.

    `lengths` int32 `[rows]`; `sinks` float32 `[heads]`; `mixed`, `peaks` and `sums` as in DecodeScratch, with
    room for `scratch_splits` splits; `out [rows, heads, D]`. JOINED splits are read at a time; grid `[heads,
    rows]`.
    """
    row = tl.program_id(1)
    length = tl.load(lengths + row)
    read = length - first_read(length, WINDOW, BLOCK_SIZE)
    size = split_size(read)
    count = (read + size - 1) // size
    # A row with one split is finished already.
    if count != 1:
        row_head = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        dims = tl.arange(0, D_PAD)
        in_head = dims < D
        base = row_head * scratch_splits
        highest = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        if SINKS:
            highest = tl.load(sinks + tl.program_id(0)) * LOG2_E_F32
            total = total + 1.0
        acc = tl.zeros([D_PAD], tl.float32)
        for first in range(0, count, JOINED):
            split = first + tl.arange(0, JOINED)
            there = split < count
            peak = tl.load(peaks + base + split, mask=there, other=float("-inf"))
            part = tl.load(sums + base + split, mask=there, other=0.0)
            place = mixed + (base + split)[:, None] * D + dims[None, :]
            values = tl.load(place, mask=there[:, None] & in_head[None, :], other=0.0)
            higher = tl.maximum(highest, tl.max(peak, axis=0))
            faded = tl.exp2(peak - higher)
            before = tl.exp2(highest - higher)
            total = total * before + tl.sum(part * faded, axis=0)
            acc = acc * before + tl.sum(values * faded[:, None], axis=0)
            highest = higher
        # A row without a context (padding of a captured batch) is zero.
        result = acc / tl.where(count > 0, total, 1.0)
        tl.store(out + row_head * D + dims, result.to(out.dtype.element_ty), mask=in_head)


def join_splits(
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    out: torch.Tensor,
    block_size: int,
    window: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write to `out [rows, heads, head_dim]` the rows that have more splits than one, or none.

    `lengths` is int32 `[rows]`; `block_size` and `window` (0 is none), in tokens, are those with which the
    splits were made. `sinks`, float32 `[heads]`, are logits beside each head's scores.
    """
    rows, heads, head_dim = out.shape
    _join[(heads, rows)](
        lengths, scratch.sums if sinks is None else sinks, scratch.mixed, scratch.peaks, scratch.sums, out,
        scratch.sums.shape[2], D=head_dim, D_PAD=power_of_two(head_dim), BLOCK_SIZE=block_size, WINDOW=window,
        SINKS=sinks is not None, JOINED=_JOINED, num_warps=4,
    )  # fmt: skip
