"""Norms and rotation of a row's new token, and the write of its key and value, within decode attention.

The meaning is rotary_write.py's, whose launch it spares. By arithmetic for an H200: that launch took 1.6 µs a
layer beside one row (measured), of a step of 4.7 ms 1.1%. Here the query of a split is rotated as it is read,
loads that do not wait for one another, and the program that walks a row's last split stores its key and value
before, and waits for its own threads: 0.4 µs once a row and KV head. No program of another split reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.rotary_write import stored


@dataclass(frozen=True)
class FreshRows:
    """New tokens of decode rows, before their norms and rotation; arguments as those of `rotary_write`."""

    qkv: torch.Tensor
    """`[rows, heads + 2 * kv_heads, D]`."""
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    """float32 `[rows, D / 2]`; None where nothing is rotated."""
    block_ids: torch.Tensor
    """int64 `[rows]`; -1 where nothing is to be written."""
    lanes: torch.Tensor
    """int32 `[rows]`."""
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_late: bool = False
    eps: float = 0.0


@triton.jit
def turned(
    heads_at, mask, weight, cos, sin, eps, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr,
    NORM_LATE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Return heads, whose first numbers are at `heads_at [heads]` where `mask [heads]`, normalised by `weight
    [D]` and rotated by the `cos` and `sin [D / 2]` of their token: float32 `[heads, D_PAD]`.
    """
    HALF: tl.constexpr = D // 2
    TYPE: tl.constexpr = heads_at.dtype.element_ty
    dims = tl.arange(0, D_PAD)
    inside = mask[:, None] & (dims < D)[None, :]
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    x = tl.load(heads_at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(heads_at[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM and not NORM_LATE:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = _weighted(x * scale, weight, dims, dims < D, TYPE)
        y = _weighted(y * scale, weight, other, dims < D, TYPE)
    if ROTATE:
        angle = tl.where(dims < HALF, dims, dims - HALF)
        turn = tl.load(cos + angle, mask=dims < D, other=0.0).to(tl.float32)[None, :]
        side = tl.load(sin + angle, mask=dims < D, other=0.0).to(tl.float32)[None, :]
        x = tl.where((dims < HALF)[None, :], x * turn - y * side, x * turn + y * side)
    if NORM and NORM_LATE:
        x = x.to(TYPE).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = _weighted(x * scale, weight, dims, dims < D, TYPE)
    return x.to(TYPE).to(tl.float32)


@triton.jit
def _weighted(x, weight, dims, inside, TYPE: tl.constexpr):
    """Multiply `x [heads, dims]` by its weights, rounded as in kernels/rms_norm.py."""
    of = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    if weight.dtype.element_ty != tl.float32:
        x = x.to(TYPE).to(tl.float32)
    return (x * of).to(TYPE).to(tl.float32)


@triton.jit
def write_fresh(
    token_at, keys, values, block, lane, block_stride, head, k_norm, cos, sin, eps, key_scale, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, NORM_LATE: tl.constexpr, ROTATE: tl.constexpr,
    SCALED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Store the key and value of one KV head of the token whose heads `[heads + 2 * kv_heads, D]` are at
    `token_at`.

    They go to `lane` of `block`, unless that is negative; `keys` and `values` are the head's place in block
    0. All threads of the program see them afterwards.
    """
    if block >= 0:
        TYPE: tl.constexpr = keys.dtype.element_ty
        dims = tl.arange(0, D_PAD)
        one = tl.arange(0, 1)
        inside = (dims < D)[None, :]
        of_key, of_value = (HEADS + head + one) * D, (HEADS + KV_HEADS + head + one) * D
        k = turned(token_at + of_key, one < 1, k_norm, cos, sin, eps, D, D_PAD, NORM, NORM_LATE, ROTATE)
        v = turned(token_at + of_value, one < 1, k_norm, cos, sin, eps, D, D_PAD, False, False, False)
        start = block.to(tl.int64) * block_stride
        k = stored(k, key_scale, SCALED, TYPE, BY_HAND)
        v = stored(v, value_scale, SCALED, TYPE, BY_HAND)
        tl.store(keys + start + (dims * BLOCK_SIZE + lane)[None, :], k, mask=inside)
        tl.store(values + start + (lane * D + dims)[None, :], v, mask=inside)
    tl.debug_barrier()
