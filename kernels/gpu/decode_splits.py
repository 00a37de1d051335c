"""The splits that a row's context is cut into for decode attention, and the pass that joins their results.

The first pass, kernels/gpu/paged_decode.py, computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, power_of_two

SHORT_CONTEXT = 2048
"""Tokens. Up to here splits are short, so that one young sequence fills more of the device."""
SHORT_SPLIT = 128
LONG_SPLIT = 512
"""Tokens of a split. Its partial result in float32 is under 2% of the bytes read for it."""
_JOINED = 32
"""Splits that the second pass adds at a time."""
_JOINED_DIMS = 64


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
    """The most splits that a context of up to `max_tokens` can have."""
    return max(1, -(-min(max_tokens, SHORT_CONTEXT) // SHORT_SPLIT), -(-max_tokens // LONG_SPLIT))


def make_scratch(
    rows: int, heads: int, head_dim: int, max_tokens: int, device: torch.device
) -> DecodeScratch:
    """Scratch for up to `rows` rows with contexts of up to `max_tokens`."""
    splits = max_splits(max_tokens)
    return DecodeScratch(
        torch.empty(rows, heads, splits, head_dim, device=device),
        torch.empty(rows, heads, splits, device=device),
        torch.empty(rows, heads, splits, device=device),
    )


@triton.jit
def first_read(lengths, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where reading begins: the start of the block that holds the first visible position."""
    first = lengths * 0
    if WINDOW > 0:
        first = tl.maximum(lengths - WINDOW, 0) // BLOCK_SIZE * BLOCK_SIZE
    return first


@triton.jit
def split_size(tokens, SHORT_CONTEXT: tl.constexpr, SHORT_SPLIT: tl.constexpr, LONG_SPLIT: tl.constexpr):
    return tl.where(tokens <= SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT)


@triton.jit(do_not_specialize=["lengths", "scratch_splits"])
def _join(
    lengths,
    mixed,
    peaks,
    sums,
    out,
    scratch_splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHORT_CONTEXT: tl.constexpr,
    SHORT_SPLIT: tl.constexpr,
    LONG_SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
):
    row = tl.program_id(2)
    length = tl.load(lengths + row)
    read = length - first_read(length, WINDOW, BLOCK_SIZE)
    size = split_size(read, SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT)
    count = (read + size - 1) // size
    # A row with one split is finished already.
    if count != 1:
        row_head = row.to(tl.int64) * HEADS + tl.program_id(1)
        dims = tl.program_id(0) * DIMS + tl.arange(0, DIMS)
        in_head = dims < D
        some = tl.arange(0, JOINED)
        base = row_head * scratch_splits
        top = tl.full([JOINED], float("-inf"), tl.float32)
        for first in range(0, count, JOINED):
            there = first + some < count
            top = tl.maximum(top, tl.load(peaks + base + first + some, mask=there, other=float("-inf")))
        highest = tl.max(top, axis=0)
        acc = tl.zeros([DIMS], tl.float32)
        total = 0.0
        for first in range(0, count, JOINED):
            split = base + first + some
            there = first + some < count
            faded = tl.exp2(tl.load(peaks + split, mask=there, other=float("-inf")) - highest)
            part = tl.load(
                mixed + split[:, None] * D + dims[None, :], mask=there[:, None] & in_head[None, :], other=0.0
            )
            acc += tl.sum(part * faded[:, None], axis=0)
            total += tl.sum(tl.load(sums + split, mask=there, other=0.0) * faded, axis=0)
        # A row without a context (padding of a captured batch) is zero.
        result = acc / tl.where(count > 0, total, 1.0)
        tl.store(out + row_head * D + dims, result.to(out.dtype.element_ty), mask=in_head)


def join_splits(
    lengths: torch.Tensor, scratch: DecodeScratch, out: torch.Tensor, splitting: dict[str, int]
) -> None:
    """Writes to `out [rows, heads, head_dim]` the rows that have more splits than one, or none.

    `splitting` is how the splits were made: both kernels take the same constants.
    """
    rows, heads, head_dim = out.shape
    dims = power_of_two(head_dim) if INTERPRETED else _JOINED_DIMS
    _join[(triton.cdiv(head_dim, dims), heads, rows)](
        lengths,
        scratch.mixed,
        scratch.peaks,
        scratch.sums,
        out,
        scratch.sums.shape[2],
        HEADS=heads,
        D=head_dim,
        DIMS=dims,
        JOINED=_JOINED,
        num_warps=4,
        **splitting,
    )
