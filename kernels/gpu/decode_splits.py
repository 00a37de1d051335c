"""The splits of a row's context in decode attention, and the join of their results.

The first pass, kernels/gpu/paged_decode.py, computes them. Splits are joined in groups of 16, and then the
groups, both in their order and a few at a time: one sum, made by the last program to finish a split (a FOLD)
or by a pass of its own.

By arithmetic for an H200 and four query heads a KV head: a pass of its own took 2.8 µs a layer beside one row
(measured) and reads 9 MB beside 64 rows of 2,050 tokens, 5 µs. In the fold a group is two loads of 16 KB, 0.8
µs each, after 0.7 µs for the count: 2.3 µs beside one row, and beside many hidden behind other rows' splits.
Of 128K tokens, 16 groups, 5 µs instead of 8.
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
GROUPED = 16
"""Splits of a group: those of up to 8,192 tokens are one."""
_GROUPED = tl.constexpr(GROUPED)
_AT_ONCE = 4096
"""Numbers that are joined at a time: 128 registers of one warp. Over a cache in FP8, where a program without
the fold has 168 and a multiprocessor twelve of them, half as many, or there would be eight.
"""


@dataclass(frozen=True)
class DecodeScratch:
    """Partial results of all splits, float32: allocated once, used by every layer and step."""

    mixed: torch.Tensor
    """`[rows, heads, splits, head_dim]`, not yet divided by the sums."""
    peaks: torch.Tensor
    """`[rows, heads, splits]`: the largest score of each split, times log2(e)."""
    sums: torch.Tensor
    """`[rows, heads, splits]`."""
    finished: torch.Tensor
    """int32 `[rows, heads, 1 + groups]`, zero between steps: how many groups of a KV head have finished, and
    how many splits of each.
    """


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
        torch.zeros(rows, heads, 1 + triton.cdiv(splits, GROUPED), dtype=torch.int32, device=device),
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


@triton.jit
def joined(
    mixed, peaks, sums, base, first, count, HEADS: tl.constexpr, EVERY: tl.constexpr, TOGETHER: tl.constexpr,
    HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Return the join of `count` partial results of HEADS heads, at `base [HEADS_PAD] + first` and every
    EVERY further: their sum `[HEADS_PAD, D_PAD]`, peak and total `[HEADS_PAD]`.

    `mixed`, `peaks` and `sums` as in DecodeScratch; `count` is 0 or more. TOGETHER are read at a time, from
    where all programs see them.
    """
    dims = tl.arange(0, D_PAD)
    real = tl.arange(0, HEADS_PAD) < HEADS
    highest = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_PAD], tl.float32)
    acc = tl.zeros([HEADS_PAD, D_PAD], tl.float32)
    for begin in range(0, count, TOGETHER):
        number = begin + tl.arange(0, TOGETHER)
        there = (number < count)[:, None] & real[None, :]
        place = base[None, :] + first + number[:, None] * EVERY
        peak = tl.load(peaks + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(sums + place, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(
            mixed + place[:, :, None] * D + dims[None, None, :],
            mask=there[:, :, None] & (dims < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(peak, axis=0))
        # Heads that pad the tile have no peak: nothing less nothing would not be a number.
        anchor = tl.where(real, higher, 0.0)
        faded = tl.exp2(peak - anchor[None, :])
        before = tl.exp2(highest - anchor)
        total = total * before + tl.sum(part * faded, axis=0)
        acc = acc * before[:, None] + tl.sum(values * faded[:, :, None], axis=0)
        highest = higher
    return acc, highest, total


@triton.jit
def store_joined(
    acc, highest, total, sinks, heads, out, row_head, SINKS: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Write the result of `joined`, beside the `sinks` of heads `heads [HEADS_PAD]`, to rows `row_head
    [HEADS_PAD]` of `out [rows * heads, D]`.
    """
    dims = tl.arange(0, D_PAD)
    real = tl.arange(0, HEADS_PAD) < HEADS
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2_E_F32
        higher = tl.maximum(highest, sink)
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.exp2(sink - higher)
        acc = acc * faded[:, None]
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + row_head[:, None] * D + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=real[:, None] & (dims < D)[None, :])


@triton.jit
def store_partial(
    mixed, peaks, sums, place, acc, peak, total, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Write a partial result of HEADS heads, `acc [HEADS_PAD, D_PAD]`, `peak` and `total [HEADS_PAD]`, to
    `place [HEADS_PAD]` of `mixed`, `peaks` and `sums`, which are those of DecodeScratch.
    """
    dims = tl.arange(0, D_PAD)
    real = tl.arange(0, HEADS_PAD) < HEADS
    kept = real[:, None] & (dims < D)[None, :]
    tl.store(mixed + place[:, None] * D + dims[None, :], acc, mask=kept)
    tl.store(peaks + place, peak, mask=real)
    tl.store(sums + place, total, mask=real)


@triton.jit
def fold_in(
    mixed, peaks, sums, finished, base, split, count, HEADS: tl.constexpr,
    TOGETHER: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Count split `split` of `count` as finished; the last one of a group joins it, the last group all.

    `base [HEADS_PAD]` is the heads' first place in the scratch, `finished` the counters of this row and KV
    head, zero again when all is done. Returns whether this was the last, and the result of `joined` then.
    """
    group = split // _GROUPED
    groups = (count + _GROUPED - 1) // _GROUPED
    first = group * _GROUPED
    here = tl.minimum(count - first, _GROUPED)
    acc = tl.zeros([HEADS_PAD, D_PAD], tl.float32)
    highest = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_PAD], tl.float32)
    last = count < 0
    # What all threads wrote comes before the count, which one of them makes known to the device.
    tl.debug_barrier()
    if tl.atomic_add(finished + 1 + group, 1, sem="acq_rel") == here - 1:
        tl.store(finished + 1 + group, 0)
        acc, highest, total = joined(
            mixed, peaks, sums, base, first, here, HEADS, 1, TOGETHER, HEADS_PAD, D, D_PAD
        )
        last = groups == 1
        if groups > 1:
            # All have read a group before its first place is written over.
            tl.debug_barrier()
            store_partial(mixed, peaks, sums, base + first, acc, highest, total, HEADS, HEADS_PAD, D, D_PAD)
            tl.debug_barrier()
            last = tl.atomic_add(finished, 1, sem="acq_rel") == groups - 1
            if last:
                tl.store(finished, 0)
                acc, highest, total = joined(
                    mixed, peaks, sums, base, 0, groups, HEADS, _GROUPED, TOGETHER, HEADS_PAD, D, D_PAD
                )
    return last, acc, highest, total


@triton.jit(do_not_specialize=["lengths", "scratch_splits"])
def _join(
    lengths, sinks, mixed, peaks, sums, out, scratch_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, TOGETHER: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one KV head of one row that has several: groups of splits, then the groups.

    `lengths` int32 `[rows]`; `sinks` float32 `[heads]`; `mixed`, `peaks` and `sums` as in DecodeScratch, with
    room for `scratch_splits` splits; `out [rows, heads, D]`; grid `[KV_HEADS, rows]`.
    """
    row = tl.program_id(1)
    length = tl.load(lengths + row)
    read = length - first_read(length, WINDOW, BLOCK_SIZE)
    size = split_size(read)
    count = (read + size - 1) // size
    # A row with one split, or none, is finished already.
    if count > 1:
        member = tl.arange(0, HEADS_PAD)
        heads = tl.program_id(0) * GROUP + member
        row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
        base = row_head * scratch_splits
        groups = (count + _GROUPED - 1) // _GROUPED
        if groups > 1:
            for group in range(groups):
                first = group * _GROUPED
                acc, highest, total = joined(
                    mixed, peaks, sums, base, first, tl.minimum(count - first, _GROUPED), GROUP, 1, TOGETHER,
                    HEADS_PAD, D, D_PAD,
                )  # fmt: skip
                tl.debug_barrier()
                store_partial(
                    mixed, peaks, sums, base + first, acc, highest, total, GROUP, HEADS_PAD, D, D_PAD
                )
            tl.debug_barrier()
            acc, highest, total = joined(
                mixed, peaks, sums, base, 0, groups, GROUP, _GROUPED, TOGETHER, HEADS_PAD, D, D_PAD
            )
        else:
            acc, highest, total = joined(
                mixed, peaks, sums, base, 0, count, GROUP, 1, TOGETHER, HEADS_PAD, D, D_PAD
            )
        store_joined(
            acc, highest, total, sinks, heads, out, row_head, SINKS, GROUP, HEADS_PAD, D, D_PAD
        )  # fmt: skip


def join_sizes(group: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """Return the sizes with which `joined` joins `group` heads a KV head, `itemsize` bytes a number of the
    cache: HEADS_PAD and TOGETHER.
    """
    heads, most = power_of_two(group), _AT_ONCE // 2 if itemsize == 1 else _AT_ONCE
    together = most // (heads * power_of_two(head_dim, 16))
    return {"HEADS_PAD": heads, "TOGETHER": min(GROUPED, max(1, together))}


def join_splits(
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    out: torch.Tensor,
    kv_heads: int,
    block_size: int,
    window: int,
    sinks: torch.Tensor | None = None,
    *,
    sizes: dict[str, int],
) -> None:
    """Write to `out [rows, heads, head_dim]` the rows that have more splits than one.

    `lengths` is int32 `[rows]`; `block_size` and `window` (0 is none), in tokens, are those with which the
    splits were made. `sinks`, float32 `[heads]`, are logits beside each head's scores; `sizes` are those of
    `join_sizes`.
    """
    rows, heads, head_dim = out.shape
    group = heads // kv_heads
    _join[(kv_heads, rows)](
        lengths, scratch.sums if sinks is None else sinks, scratch.mixed, scratch.peaks, scratch.sums, out,
        scratch.sums.shape[2], KV_HEADS=kv_heads, GROUP=group, D=head_dim, D_PAD=power_of_two(head_dim, 16),
        BLOCK_SIZE=block_size, WINDOW=window, SINKS=sinks is not None, **sizes,
        num_warps=1,
    )  # fmt: skip
