"""Launch between the QKV product and attention: norms, rotary embedding, and the write of the KV blocks.

The meaning is kernels/rms_norm.py and kernels/rotary.py, then kernels/kv_blocks.py's `write_kv_rows`. One
program takes a tile of tokens of one head. Keys lie transposed in a block, so neighbouring threads store
neighbouring tokens: a tile of 16 consecutive tokens fills whole sectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import INTERPRETED, check_dense, power_of_two

_FEW_TOKENS = 128
"""Up to here a step is decode: one token a program spreads it over the device."""


@triton.jit
def _unit(first, second, weight, at, inside, HALF: tl.constexpr, D: tl.constexpr, eps, TYPE: tl.constexpr):
    """Normalise heads held in two halves, `first` and `second [tokens, D / 2]`; rounded as in
    kernels/rms_norm.py.
    """
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    low = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    first, second = first * scale, second * scale
    if weight.dtype.element_ty != tl.float32:
        first = first.to(TYPE).to(tl.float32)
        second = second.to(TYPE).to(tl.float32)
    return (first * low).to(TYPE).to(tl.float32), (second * high).to(TYPE).to(tl.float32)


@triton.jit
def _on_grid(x):
    """Round float32 `x [...]` to the nearest number of E4M3; of two the even one."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2**-6 all steps are 2**-9, the last place of this sum.
    near_zero = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, near_zero, bits.to(tl.float32, bitcast=True))


@triton.jit
def stored(x, scale, SCALED: tl.constexpr, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `x [...]` as the cache holds it; beyond what FP8 can say it is cut off, not infinite. NaN stays
    NaN.
    """
    if SCALED:
        x = x / scale
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        if INTERPRETED:
            # The interpreter rounds the mantissa without a carry: 1.98 would become 1.
            x = _on_grid(x)
    return x.to(TYPE)


# One kernel whatever a step's packing happens to be, as in paged_decode.py.
@triton.jit(do_not_specialize=["block_ids", "lanes", "origin", "tokens"])
def _rotary_write(
    qkv,
    cos,
    sin,
    blocks,
    block_ids,
    lanes,
    origin,
    q_norm,
    k_norm,
    scales,
    out,
    tokens,
    layer_offset,
    block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KIND_STRIDE: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_LATE: tl.constexpr,
    ROTATE: tl.constexpr,
    SCALED: tl.constexpr,
    BASED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotate or store TOKENS tokens of one head.

    `qkv` is `[tokens, HEADS + 2 * KV_HEADS, D]`; `cos` and `sin` float32 `[tokens, D / 2]`; `blocks` the KV
    memory from `layer_offset` elements on, `block_stride` elements a block, values KIND_STRIDE elements
    behind keys; `block_ids` int64 and `lanes` int32 `[tokens]`; `origin` int64 `[1]`: with BASED the elements
    from `blocks` to the KV memory; `q_norm` and `k_norm [D]`; `scales` float32 `[2, KV_HEADS]` of the layer;
    `out [tokens, HEADS, D]`.
    """
    HALF: tl.constexpr = D // 2
    TYPE: tl.constexpr = qkv.dtype.element_ty
    STORED: tl.constexpr = blocks.dtype.element_ty
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, HALF_PAD)
    real = token < tokens
    inside = at < HALF
    both = real[:, None] & inside[None, :]
    row = token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + head * D
    place = qkv + row[:, None] + at[None, :]
    first = tl.load(place, mask=both, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=both, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM and not NORM_LATE:
            if head < HEADS:
                first, second = _unit(first, second, q_norm, at, inside, HALF, D, eps, TYPE)
            else:
                first, second = _unit(first, second, k_norm, at, inside, HALF, D, eps, TYPE)
        if ROTATE:
            angle = token[:, None] * HALF + at[None, :]
            turn = tl.load(cos + angle, mask=both, other=0.0).to(tl.float32)
            side = tl.load(sin + angle, mask=both, other=0.0).to(tl.float32)
            turned = first * turn - second * side
            second = second * turn + first * side
            first = turned
        if NORM and NORM_LATE:
            first = first.to(TYPE).to(tl.float32)
            second = second.to(TYPE).to(tl.float32)
            if head < HEADS:
                first, second = _unit(first, second, q_norm, at, inside, HALF, D, eps, TYPE)
            else:
                first, second = _unit(first, second, k_norm, at, inside, HALF, D, eps, TYPE)
    if head < HEADS:
        q_place = out + token.to(tl.int64)[:, None] * (HEADS * D) + head * D + at[None, :]
        tl.store(q_place, first.to(TYPE), mask=both)
        tl.store(q_place + HALF, second.to(TYPE), mask=both)
    else:
        block = tl.load(block_ids + token, mask=real, other=-1)
        lane = tl.load(lanes + token, mask=real, other=0)
        kept = block >= 0
        kv_head = (head - HEADS) % KV_HEADS
        is_value = (head - HEADS) // KV_HEADS
        scale = 1.0
        if SCALED:
            scale = tl.load(scales + is_value * KV_HEADS + kv_head)
        base = blocks + layer_offset + is_value * KIND_STRIDE + kv_head * (D * BLOCK_SIZE)
        start = tl.maximum(block, 0).to(tl.int64) * block_stride
        if BASED:
            start += tl.multiple_of(tl.load(origin), 16)
        low = stored(first, scale, SCALED, STORED, INTERPRETED)
        high = stored(second, scale, SCALED, STORED, INTERPRETED)
        if is_value == 0:
            k_place = base + start[None, :] + at[:, None] * BLOCK_SIZE + lane[None, :]
            k_here = kept[None, :] & inside[:, None]
            tl.store(k_place, tl.trans(low), mask=k_here)
            tl.store(k_place + HALF * BLOCK_SIZE, tl.trans(high), mask=k_here)
        else:
            v_place = base + start[:, None] + lane[:, None] * D + at[None, :]
            v_here = kept[:, None] & inside[None, :]
            tl.store(v_place, low, mask=v_here)
            tl.store(v_place + HALF, high, mask=v_here)


def rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    blocks: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    lanes: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_late: bool = False,
    eps: float = 0.0,
    scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    one_tile: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys of `qkv [T, heads + 2 * kv_heads, D]` and store keys and values in their
    blocks.

    `cos` and `sin` are `[T, D / 2]`, None where nothing is rotated. Token t goes to block `block_ids[t]`
    (int64, -1 where nothing is to be written: padding rows), lane `lanes[t]` (int32), of `blocks [num_blocks,
    layers, 2, kv_heads, D * block_size]`, which may be a view of some layers and heads. Both norms (`[D]`,
    with `eps`) come before the rotation, with `norm_late` after it, or neither is there. With `scales`,
    float32 `[layers, 2, kv_heads]`, the cache holds each number divided by the scale of its head (FP8). With
    `base`, int64 `[1]` on the device, a multiple of 16, the memory begins so many elements behind `blocks`,
    which only has its layout. With `one_tile` steps of any size are one kernel's. Returns the queries `[T,
    heads, D]`.
    """
    tokens, _, head_dim = check_dense("qkv", qkv).shape
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are both normalised, or neither")
    if (cos is None) != (sin is None):
        raise ValueError("cosines and sines are both given, or neither")
    out = qkv.new_empty(tokens, heads, head_dim) if out is None else out
    if tokens == 0:
        return out
    tile = 1 if tokens <= _FEW_TOKENS and not one_tile and not INTERPRETED else 16
    _rotary_write[(triton.cdiv(tokens, tile), heads + 2 * kv_heads)](
        qkv,
        qkv if cos is None else check_dense("cos", cos),
        qkv if sin is None else check_dense("sin", sin),
        blocks,
        block_ids,
        lanes,
        block_ids if base is None else base,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv if scales is None else scales[layer],
        check_dense("out", out),
        tokens,
        layer * blocks.stride(1),
        blocks.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        KIND_STRIDE=blocks.stride(2),
        D=head_dim,
        HALF_PAD=power_of_two(head_dim // 2),
        BLOCK_SIZE=blocks.shape[-1] // head_dim,
        TOKENS=tile,
        NORM=q_norm is not None,
        NORM_LATE=norm_late,
        ROTATE=cos is not None,
        SCALED=scales is not None,
        BASED=base is not None,
        INTERPRETED=INTERPRETED,
        num_warps=1 if tile == 1 else 4,
    )
    return out
