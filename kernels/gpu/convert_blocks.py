"""Conversion of a sequence's KV blocks between two layouts in one launch, the digest computed on the way.

The meaning is kernels/convert_blocks.py. A program takes a tile of tokens of one head of a layer's keys or
values. Strides are arguments: Triton knows of those that are 1, and so which numbers lie beside one another.
A tile lies in one unit of the digest where it can, so that a program adds one number to it: an addition a
token took longer than the copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.convert_blocks import BITS, HeadRange, KVView, check
from kernels.copy_blocks import FIRST, GOLDEN, SECOND
from kernels.gpu.launch import power_of_two

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_TOKENS = 64
"""Most tokens of a tile: of heads of 128 in 16 bits a thread has eight loads of 16 bytes in flight."""
_LEAST_TOKENS = 16


@triton.jit
def _places(
    base,
    ids,
    at,
    real,
    layer,
    head,
    block,
    layers,
    heads,
    lanes,
    dims,
    SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Return the addresses `[tokens, dims]` of the numbers of tokens `at [tokens]`.

    `ids [blocks]` is the block table; `block` to `dims` are the strides of `KVView`'s axes, in elements.
    """
    blocks = tl.load(ids + at // SIZE, mask=real, other=0).to(tl.int64)
    start = base + layer.to(tl.int64) * layers + head.to(tl.int64) * heads
    by_token = blocks * block + (at % SIZE).to(tl.int64) * lanes
    return start + by_token[:, None] + tl.arange(0, D_PAD)[None, :] * dims


@triton.jit
def _add_digest(
    bits, digests, binding, at, real, row, UNIT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Add what `bits [tokens, dims]` of tokens `at`, those that are `real`, change of their units' digests.

    `row` is the number of the head among those of all planes; `digests` and `binding` int64.
    """
    dims = tl.arange(0, D_PAD)
    bound = tl.load(binding + at // UNIT, mask=real, other=0).to(tl.uint64, bitcast=True)
    first = (row.to(tl.int64) * UNIT + at % UNIT) * D
    # A product a token and one a column, where one a number would take as long as the bytes.
    by_token = bound + first.to(tl.uint64) * _GOLDEN
    by_column = (dims + 1).to(tl.uint64) * _GOLDEN
    mixed = bits.to(tl.int64).to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (by_token[:, None] + by_column[None, :])) * _FIRST
    mixed = (mixed ^ (mixed >> 32)) * _SECOND
    mixed = (mixed ^ (mixed >> 29)).to(tl.int64, bitcast=True)
    if D != D_PAD:
        mixed = tl.where((dims < D)[None, :], mixed, 0)
    found = tl.where(real, tl.sum(mixed, axis=1), 0)
    # Whole numbers: whichever program adds first, the sum is the same.
    if UNIT % TOKENS == 0:
        tl.atomic_add(digests + tl.program_id(0) * TOKENS // UNIT, tl.sum(found, axis=0), sem="relaxed")
    else:
        tl.atomic_add(digests + at // UNIT, found, mask=real, sem="relaxed")


@triton.jit
def _convert(
    source_keys, source_values, source_ids, target_keys, target_values, target_ids, digests, binding, tokens,
    sk0, sk1, sk2, sk3, sk4, sv0, sv1, sv2, sv3, sv4, tk0, tk1, tk2, tk3, tk4, tv0, tv1, tv2, tv3, tv4,
    source_head, target_head, SOURCE_SIZE: tl.constexpr, TARGET_SIZE: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, DIGEST: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Convert one tile of TOKENS tokens of one head of one layer's keys or values.

    `source_*` and `target_*` are `[blocks, layers, kv_heads, lanes, head_dim]` with strides `sk0` to `tv4` in
    elements, their tables `[n]`; `digests` and `binding` are int64, one for every UNIT tokens. SOURCE_SIZE
    and TARGET_SIZE are tokens a block; without STORE the source is only read; grid `[tiles, layers * 2 *
    HEADS]`.
    """
    # Of all layers, their keys and values (a plane each), and the heads of these.
    head = tl.program_id(1) % HEADS
    plane = tl.program_id(1) // HEADS
    layer = plane // 2
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, D_PAD)
    real = at < tokens
    both = real[:, None] & (dims < D)[None, :]
    if plane % 2 == 0:
        origin = _places(
            source_keys, source_ids, at, real, layer, source_head + head,
            sk0, sk1, sk2, sk3, sk4, SOURCE_SIZE, D_PAD,
        )  # fmt: skip
        place = _places(
            target_keys, target_ids, at, real, layer, target_head + head,
            tk0, tk1, tk2, tk3, tk4, TARGET_SIZE, D_PAD,
        )  # fmt: skip
        bits = tl.load(origin, mask=both, other=0)
        if STORE:
            tl.store(place, bits, mask=both)
        if DIGEST:
            _add_digest(bits, digests, binding, at, real, plane * HEADS + head, UNIT, D, D_PAD, TOKENS)
    else:
        origin = _places(
            source_values, source_ids, at, real, layer, source_head + head,
            sv0, sv1, sv2, sv3, sv4, SOURCE_SIZE, D_PAD,
        )  # fmt: skip
        place = _places(
            target_values, target_ids, at, real, layer, target_head + head,
            tv0, tv1, tv2, tv3, tv4, TARGET_SIZE, D_PAD,
        )  # fmt: skip
        bits = tl.load(origin, mask=both, other=0)
        if STORE:
            tl.store(place, bits, mask=both)
        if DIGEST:
            _add_digest(bits, digests, binding, at, real, plane * HEADS + head, UNIT, D, D_PAD, TOKENS)


def convert_blocks(
    source: KVView,
    source_ids: torch.Tensor,
    target: KVView,
    target_ids: torch.Tensor,
    heads: HeadRange,
    tokens: int,
    *,
    digests: torch.Tensor | None = None,
    binding: torch.Tensor | None = None,
) -> None:
    """Copy `tokens` tokens of one sequence, as kernels/convert_blocks.py does, with the tables on the device.

    `source` and `target` are views `[blocks, layers, kv_heads, lanes, head_dim]`, `source_ids` and
    `target_ids` their block tables `[n]`; `target` may be memory that is mapped here. With `binding` (int64
    `[n]`, one for every block of the target), the digest of what was read is left in `digests` (int64 `[n]`),
    as `logical_digests` has it with the target's block size as its unit.
    """
    check(source, source_ids, target, target_ids, heads, tokens)
    if (digests is None) != (binding is None):
        raise ValueError("a digest needs a binding, and a binding is for a digest")
    _launch(source, source_ids, target, target_ids, heads, tokens, digests, binding, store=True)


def digest_blocks(
    view: KVView,
    ids: torch.Tensor,
    heads: range,
    tokens: int,
    *,
    digests: torch.Tensor,
    binding: torch.Tensor,
) -> None:
    """Leave in `digests` (int64 `[n]`) what `convert_blocks` leaves there of the KV heads `heads` of a
    sequence whose blocks in `view` are `ids [n]`, as they are now. Nothing is written beside.
    """
    own = HeadRange(heads.start, heads.start, len(heads))
    check(view, ids, view, ids, own, tokens)
    _launch(view, ids, view, ids, own, tokens, digests, binding, store=False)


def _launch(
    source: KVView,
    source_ids: torch.Tensor,
    target: KVView,
    target_ids: torch.Tensor,
    heads: HeadRange,
    tokens: int,
    digests: torch.Tensor | None,
    binding: torch.Tensor | None,
    *,
    store: bool,
) -> None:
    if digests is not None:
        digests.zero_()
    if tokens == 0 or heads.count == 0:
        return
    bits = BITS[source.keys.element_size()]
    parts = [part.view(bits) for part in (source.keys, source.values, target.keys, target.values)]
    _, layers, _, _, head_dim = parts[0].shape
    tile = _tile(target.block_size)
    _convert[(triton.cdiv(tokens, tile), layers * 2 * heads.count)](
        parts[0], parts[1], source_ids, parts[2], parts[3], target_ids,
        source_ids if digests is None else digests,
        source_ids if binding is None else binding,
        tokens,
        *(stride for part in parts for stride in part.stride()),
        heads.source, heads.target, source.block_size, target.block_size,
        HEADS=heads.count, D=head_dim, D_PAD=power_of_two(head_dim), UNIT=target.block_size,
        TOKENS=tile, DIGEST=digests is not None, STORE=store, num_warps=4,
    )  # fmt: skip


def _tile(unit: int) -> int:
    """Return the tokens of a tile: as many as can be, in one unit of the digest where that is not too few."""
    shared = unit & -unit  # the largest power of two that divides it
    return min(_TOKENS, shared) if shared >= _LEAST_TOKENS else _TOKENS
