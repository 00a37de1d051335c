"""Conversion of a sequence's KV blocks between two layouts in one launch, the digest computed on the way.

The meaning is kernels/convert_blocks.py. A program takes a tile of tokens of one head of a layer's keys or
values, cut into runs: tokens that lie in one block on either side, so that a run has one address there.
Strides are arguments: Triton knows of those that are 1, and so which numbers lie beside one another.

What the parts take of an H200, which copies 4 bytes (a number of 16 bits read and written) in 1.0 ps:

- **Digest.** Mixing each number by itself is about 22 instructions, 0.95 ps a number: as long as the copy.
  That was the kernel before, at 0.49 of a copy. A product and a sum a number, mixed once a token, are
  three: 0.2 ps beside the bytes of other programs.
- **Bytes on their way.** A multiprocessor moves 30 GB/s: at a microsecond from table to number it needs 18 KB
  of loads on their way. A tile of 64 tokens is 16 KB, and a multiprocessor holds at least four.
- **Addresses.** Programs that run together take the heads and layers of one stretch of tokens: some fifteen
  pages of 2 MB, where neighbouring stretches first were six hundred.
"""

from __future__ import annotations

import math

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
"""Tokens of a tile: of heads of 128 in 16 bits a thread has eight loads of 16 bytes in flight."""
_BYTES_A_WARP = 4096
_MOST_WARPS = 8


@triton.jit
def _places(
    base, ids, first, tokens, layer, head, block, layers, heads, lanes, dims,
    SIZE: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Return the addresses `[RUNS, RUN, D_PAD]` of the numbers of tokens from `first` on, of `tokens`.

    `ids [blocks]` is the block table, of SIZE tokens a block; `block` to `dims` are the strides of `KVView`'s
    axes, in elements. No run crosses a block.
    """
    begins = first + tl.arange(0, RUNS) * RUN
    blocks = tl.load(ids + begins // SIZE, mask=begins < tokens, other=0).to(tl.int64)
    inside = tl.multiple_of(begins % SIZE, RUN).to(tl.int64)
    of_run = blocks * block + inside * lanes
    of_lane = tl.arange(0, RUN).to(tl.int64) * lanes
    start = base + layer.to(tl.int64) * layers + head.to(tl.int64) * heads
    of_dim = tl.arange(0, D_PAD) * dims
    return start + of_run[:, None, None] + of_lane[None, :, None] + of_dim[None, None, :]


@triton.jit
def _moved(origin, place, real, WHOLE: tl.constexpr, STORE: tl.constexpr):
    """Return what lies at addresses `origin [...]`, where `real`; with STORE copy it to `place [...]`."""
    if WHOLE:
        bits = tl.load(origin)
        if STORE:
            tl.store(place, bits)
    else:
        bits = tl.load(origin, mask=real, other=0)
        if STORE:
            tl.store(place, bits, mask=real)
    return bits


@triton.jit
def _add_digest(
    bits, digests, binding, first, tokens, row, UNIT: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    D_PAD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add what `bits [RUNS, RUN, D_PAD]` of tokens from `first` on change of their units' digests.

    `row` is the number of the head among those of all planes; `digests` and `binding` int64, one for every
    UNIT tokens. MASK has the bits of a number.
    """
    weights = (tl.arange(0, D_PAD) + 1).to(tl.uint64) * _GOLDEN
    weights = ((weights ^ (weights >> 32)) * _FIRST) | 1
    numbers = (bits.to(tl.int64) & MASK) * weights.to(tl.int64, bitcast=True)[None, None, :]
    sums = tl.sum(numbers, axis=2).to(tl.uint64, bitcast=True)
    begins = first + tl.arange(0, RUNS) * RUN
    at = begins[:, None] + tl.arange(0, RUN)[None, :]
    bound = tl.load(binding + begins // UNIT, mask=begins < tokens, other=0).to(tl.uint64, bitcast=True)
    places = row.to(tl.int64) * UNIT + at % UNIT + 1
    mixed = (sums ^ (bound[:, None] + places.to(tl.uint64) * _GOLDEN)) * _FIRST
    mixed = (mixed ^ (mixed >> 32)) * _SECOND
    mixed = (mixed ^ (mixed >> 29)).to(tl.int64, bitcast=True)
    found = tl.sum(tl.where(at < tokens, mixed, 0), axis=1)
    # Whole numbers: whichever program adds first, the sum is the same.
    if UNIT % (RUNS * RUN) == 0:
        tl.atomic_add(digests + first // UNIT, tl.sum(found, axis=0), sem="relaxed")
    else:
        tl.atomic_add(digests + begins // UNIT, found, mask=begins < tokens, sem="relaxed")


@triton.jit(do_not_specialize=["first_tile", "source_head", "target_head"])
def _convert(
    source_keys, source_values, source_ids, target_keys, target_values, target_ids, digests, binding, tokens,
    sk0, sk1, sk2, sk3, sk4, sv0, sv1, sv2, sv3, sv4, tk0, tk1, tk2, tk3, tk4, tv0, tv1, tv2, tv3, tv4,
    source_head, target_head, first_tile, SOURCE_SIZE: tl.constexpr, TARGET_SIZE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, UNIT: tl.constexpr, RUNS: tl.constexpr,
    RUN: tl.constexpr, MASK: tl.constexpr, DIGEST: tl.constexpr, WHOLE: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Convert one tile of RUNS runs of RUN tokens of one head of one layer's keys or values.

    `source_*` and `target_*` are `[blocks, layers, kv_heads, lanes, head_dim]` with strides `sk0` to `tv4` in
    elements, their tables `[n]`; `digests`, `binding`, UNIT and MASK as in `_add_digest`. SOURCE_SIZE and
    TARGET_SIZE are tokens a block; grid `[layers * 2 * HEADS, tiles]`, the first of which is `first_tile`.
    WHOLE tiles have all tokens and dimensions: a mask of single tokens would cut the loads of keys, which lie
    token beside token, into single numbers. Without STORE the source is only read.
    """
    # Of all layers, their keys and values (a plane each), and the heads of these.
    row = tl.program_id(0)
    head = row % HEADS
    plane = row // HEADS
    layer = plane // 2
    first = (first_tile + tl.program_id(1)) * (RUNS * RUN)
    at = first + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    real = (at < tokens)[:, :, None] & (tl.arange(0, D_PAD) < D)[None, None, :]
    if plane % 2 == 0:
        origin = _places(
            source_keys, source_ids, first, tokens, layer, source_head + head,
            sk0, sk1, sk2, sk3, sk4, SOURCE_SIZE, RUNS, RUN, D_PAD,
        )  # fmt: skip
        place = _places(
            target_keys, target_ids, first, tokens, layer, target_head + head,
            tk0, tk1, tk2, tk3, tk4, TARGET_SIZE, RUNS, RUN, D_PAD,
        )  # fmt: skip
        bits = _moved(origin, place, real, WHOLE, STORE)
        if DIGEST:
            _add_digest(bits, digests, binding, first, tokens, row, UNIT, RUNS, RUN, D_PAD, MASK)
    else:
        origin = _places(
            source_values, source_ids, first, tokens, layer, source_head + head,
            sv0, sv1, sv2, sv3, sv4, SOURCE_SIZE, RUNS, RUN, D_PAD,
        )  # fmt: skip
        place = _places(
            target_values, target_ids, first, tokens, layer, target_head + head,
            tv0, tv1, tv2, tv3, tv4, TARGET_SIZE, RUNS, RUN, D_PAD,
        )  # fmt: skip
        bits = _moved(origin, place, real, WHOLE, STORE)
        if DIGEST:
            _add_digest(bits, digests, binding, first, tokens, row, UNIT, RUNS, RUN, D_PAD, MASK)


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
    run = _run(source.block_size, target.block_size)
    width = power_of_two(head_dim)
    warps = _TOKENS * width * parts[0].element_size() // _BYTES_A_WARP
    whole = tokens // _TOKENS if width == head_dim else 0
    tiles = triton.cdiv(tokens, _TOKENS)
    for first, end in ((0, whole), (whole, tiles)):
        if first == end:
            continue
        _convert[(layers * 2 * heads.count, end - first)](
            parts[0], parts[1], source_ids, parts[2], parts[3], target_ids,
            source_ids if digests is None else digests,
            source_ids if binding is None else binding,
            tokens,
            *(stride for part in parts for stride in part.stride()),
            heads.source, heads.target, first, source.block_size, target.block_size,
            HEADS=heads.count, D=head_dim, D_PAD=width, UNIT=target.block_size, RUNS=_TOKENS // run, RUN=run,
            MASK=(1 << 8 * parts[0].element_size()) - 1, DIGEST=digests is not None, WHOLE=end == whole,
            STORE=store, num_warps=min(_MOST_WARPS, max(1, warps)),
        )  # fmt: skip


def _run(source: int, target: int) -> int:
    """Return the tokens of a run, between blocks of so many: the largest power of two that divides both."""
    both = math.gcd(source, target)
    return min(_TOKENS, both & -both)
