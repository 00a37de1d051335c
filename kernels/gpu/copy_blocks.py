"""Copies of whole KV blocks in one launch, all layers, with the digest computed on the way; copies between
block sizes and degrees of tensor parallelism by index arithmetic. Means kernels/copy_blocks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.copy_blocks import FIRST, GOLDEN, SECOND, block_words
from kernels.gpu.launch import power_of_two

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_WORDS = 2048
"""Words a program copies: 16 KB of 64-bit ones, eight loads of 16 bytes a thread in flight."""
_TOKENS = 32


@triton.jit
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
    pair = tl.program_id(1)
    origin = tl.load(source_ids + pair).to(tl.int64)
    place = tl.load(target_ids + pair).to(tl.int64)
    if (origin >= 0) & (place >= 0):
        at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        inside = at < words
        word = tl.load(source + origin * source_stride + at, mask=inside, other=0)
        tl.store(target + place * target_stride + at, word, mask=inside)
        if DIGEST:
            bound = tl.load(binding + pair).to(tl.uint64, bitcast=True)
            mixed = word.to(tl.int64).to(tl.uint64, bitcast=True)
            mixed = (mixed ^ (bound + (at + 1).to(tl.uint64) * _GOLDEN)) * _FIRST
            mixed = (mixed ^ (mixed >> 32)) * _SECOND
            mixed = (mixed ^ (mixed >> 29)).to(tl.int64, bitcast=True)
            # Whole numbers: whichever program adds first, the sum is the same.
            tl.atomic_add(digests + pair, tl.sum(tl.where(inside, mixed, 0), axis=0), sem="relaxed")


@triton.jit
def _convert(
    source,
    source_ids,
    target,
    target_ids,
    tokens,
    source_stride,
    target_stride,
    source_head,
    target_head,
    HEADS: tl.constexpr,
    SOURCE_HEADS: tl.constexpr,
    TARGET_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SOURCE_SIZE: tl.constexpr,
    TARGET_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # Of all layers, their keys and values (a plane each), and the heads of these.
    part = tl.program_id(1)
    head = part % HEADS
    plane = part // HEADS
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, D_PAD)
    real = at < tokens
    inside = dims < D
    origin = tl.load(source_ids + at // SOURCE_SIZE, mask=real, other=0).to(tl.int64) * source_stride
    place = tl.load(target_ids + at // TARGET_SIZE, mask=real, other=0).to(tl.int64) * target_stride
    origin += (plane * SOURCE_HEADS + source_head + head) * (D * SOURCE_SIZE)
    place += (plane * TARGET_HEADS + target_head + head) * (D * TARGET_SIZE)
    if plane % 2 == 0:
        k_mask = inside[:, None] & real[None, :]
        k_from = origin[None, :] + dims[:, None] * SOURCE_SIZE + (at % SOURCE_SIZE)[None, :]
        k_to = place[None, :] + dims[:, None] * TARGET_SIZE + (at % TARGET_SIZE)[None, :]
        tl.store(target + k_to, tl.load(source + k_from, mask=k_mask), mask=k_mask)
    else:
        v_mask = real[:, None] & inside[None, :]
        v_from = origin[:, None] + (at % SOURCE_SIZE)[:, None] * D + dims[None, :]
        v_to = place[:, None] + (at % TARGET_SIZE)[:, None] * D + dims[None, :]
        tl.store(target + v_to, tl.load(source + v_from, mask=v_mask), mask=v_mask)


def copy_blocks(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    digests: torch.Tensor | None = None,
    binding: torch.Tensor | None = None,
) -> None:
    """Copy block `source_ids[i]` of `source` over block `target_ids[i]` of `target` (integers `[n]`, on the
    device), for all i; where either is -1 nothing is copied.

    Both are KV memories `[num_blocks, layers, 2, kv_heads, head_dim * block_size]` of one layout and dtype;
    `target` may be memory of another device or process that is mapped here. With `digests` (int64 `[n]`) and
    `binding` (int64 `[n]`, see `kernels.copy_blocks.bind`), the digest of what was read is left there, 0
    where nothing was copied.
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


def convert_blocks(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    head_dim: int,
    tokens: int,
    source_head: int = 0,
    target_head: int = 0,
    heads: int | None = None,
) -> None:
    """Copy positions 0 to `tokens` of one sequence between blocks of different sizes, and of KV heads only
    `heads`, as kernels/copy_blocks.py says. `source_ids` and `target_ids` are the two tables.
    """
    if source.shape[1] != target.shape[1] or source.dtype != target.dtype:
        raise ValueError(
            f"{source.shape[1]} layers of {source.dtype} are not {target.shape[1]} of {target.dtype}"
        )
    heads = source.shape[-2] if heads is None else heads
    if max(source_head + heads - source.shape[-2], target_head + heads - target.shape[-2]) > 0:
        raise ValueError(f"{heads} heads reach beyond those of a side")
    if tokens == 0:
        return
    # As whole numbers: bits are moved, whatever they mean.
    form = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.element_size()]
    _convert[(triton.cdiv(tokens, _TOKENS), source.shape[1] * 2 * heads)](
        source.view(form),
        source_ids,
        target.view(form),
        target_ids,
        tokens,
        source.stride(0),
        target.stride(0),
        source_head,
        target_head,
        HEADS=heads,
        SOURCE_HEADS=source.shape[-2],
        TARGET_HEADS=target.shape[-2],
        D=head_dim,
        D_PAD=power_of_two(head_dim),
        SOURCE_SIZE=source.shape[-1] // head_dim,
        TARGET_SIZE=target.shape[-1] // head_dim,
        TOKENS=_TOKENS,
        num_warps=4,
    )
