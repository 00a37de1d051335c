"""Copies of whole KV blocks in one launch, all layers, with the digest computed on the way.

The meaning is kernels/copy_blocks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.copy_blocks import FIRST, GOLDEN, SECOND, block_words

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_WORDS = 2048
"""Words a program copies: 16 KB of 64-bit ones, eight loads of 16 bytes a thread in flight."""


@triton.jit(do_not_specialize=["source_ids", "target_ids", "digests", "binding"])
def _copy(
    source,
    source_ids,
    target,
    target_ids,
    digests,
    binding,
    words,
    source_stride,
    target_stride,
    DIGEST: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy WORDS words of one block `source_ids[pair]` over block `target_ids[pair]`.

    `source` and `target` are integers `[num_blocks, words]`, their ids int `[n]`, `digests` and `binding`
    int64 `[n]`; strides are words a block; grid `[ceil(words / WORDS), n]`.
    """
    pair = tl.program_id(1)
    origin = tl.load(source_ids + pair).to(tl.int64)
    place = tl.load(target_ids + pair).to(tl.int64)
    if origin >= 0:
        at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        inside = at < words
        word = tl.load(source + origin * source_stride + at, mask=inside, other=0)
        if place >= 0:
            tl.store(target + place * target_stride + at, word, mask=inside)
        if DIGEST:
            bound = tl.load(binding + pair).to(tl.uint64, bitcast=True)
            mixed = word.to(tl.int64).to(tl.uint64, bitcast=True)
            mixed = (mixed ^ (bound + (at + 1).to(tl.uint64) * _GOLDEN)) * _FIRST
            mixed = (mixed ^ (mixed >> 32)) * _SECOND
            mixed = (mixed ^ (mixed >> 29)).to(tl.int64, bitcast=True)
            # Whole numbers: whichever program adds first, the sum is the same.
            tl.atomic_add(digests + pair, tl.sum(tl.where(inside, mixed, 0), axis=0), sem="relaxed")


def copy_blocks(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    digests: torch.Tensor | None = None,
    binding: torch.Tensor | None = None,
) -> None:
    """Copy block `source_ids[i]` of `source` over block `target_ids[i]` of `target`, for all i.

    Ids are integers `[n]` on the device; where either is -1 nothing is written. Both memories are
    `[num_blocks, layers, 2, kv_heads, head_dim * block_size]` of one layout and dtype; `target` may be memory
    of another device or process that is mapped here. With `digests` (int64 `[n]`) and `binding` (int64 `[n]`,
    see `kernels.copy_blocks.bind`), the digest of block `source_ids[i]` is left there, also where the target
    is -1; 0 where the source is.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        ours, theirs = (f"{tuple(side.shape[1:])} {side.dtype}" for side in (source, target))
        raise ValueError(f"blocks of {ours} are not blocks of {theirs}")
    if (digests is None) != (binding is None):
        raise ValueError("a digest needs a binding, and a binding is for a digest")
    pairs = source_ids.shape[0]
    if digests is not None:
        digests.zero_()
    if pairs == 0:
        return
    read, written = block_words(source), block_words(target)
    words = read.shape[1]
    _copy[(triton.cdiv(words, _WORDS), pairs)](
        read,
        source_ids,
        written,
        target_ids,
        source_ids if digests is None else digests,
        source_ids if binding is None else binding,
        words,
        read.stride(0),
        written.stride(0),
        DIGEST=digests is not None,
        WORDS=_WORDS,
        num_warps=4,
    )
