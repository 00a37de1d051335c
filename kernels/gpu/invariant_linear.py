"""Products of any number of rows with a matrix of weights, in which a row has the same bits at every number.

A library picks a kernel by the number of rows, and with it the order of a row's sums. Here a sum runs over
the depth in one order, `BK` numbers at a time, into one accumulator: no split of the depth, whatever the
size. The tile of weights is the left operand of the matrix instructions and rows are the right one, as in
skinny_linear.py, so that a tile of sixteen rows and one of 128 are made of instructions of one kind.

That instructions of one kind add alike, however many rows they take, is written nowhere. So `proven_tiles`
multiplies the same rows with every tile once, and only tiles whose bits agree are used beside each other; if
they do not, one tile serves all rows.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, operand_type

_log = logging.getLogger(__name__)

Tile = dict[str, int]

# By arithmetic, not measured. The first reads weights with 48 KiB on their way a program, the last multiplies
# 128 x 128; one warp group or two take whole rows of 64 weights.
_TILES: tuple[Tile, ...] = (
    {"ROWS": 16, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 6},
    {"ROWS": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4},
    {"ROWS": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
)
"""Tiles of 16-bit numbers, from few rows to many."""
_ONE_TILE = 1
"""Place of the tile that serves all rows where the others disagree with it."""
_FLOAT32_TILE: Tile = {"ROWS": 32, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 2}


# The rows of a step vary, and so do a slice's strides: one kernel serves them all.
@triton.jit(do_not_specialize=["rows", "stride"])
def _invariant_linear(
    x, weight, bias, out, rows, outputs, stride,
    K: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows, BK of the depth at a time.

    `x [rows, K]`, `weight [outputs, K]`, `bias [outputs]`, `out [rows, outputs]` whose rows begin `stride`
    numbers apart; grid `[ceil(rows / ROWS), ceil(outputs / BN)]`: programs that follow one another share
    their weights.
    """
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    # Lanes beyond the last output read its weights once more, and store nothing.
    source = tl.minimum(output, outputs - 1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[None, :]
    k = tl.arange(0, BK)
    w_place = weight + source[:, None] * K + k[None, :]
    x_place = x + row[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros([BN, ROWS], tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        tile = tl.load(w_place + start, mask=inside[None, :], other=0.0)
        columns = tl.load(x_place + start, mask=real & inside[:, None], other=0.0)
        acc = tl.dot(tile.to(TYPE), columns.to(TYPE), acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + source).to(tl.float32)[:, None]
    place = out + row[None, :].to(tl.int64) * stride + output[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real & (output < outputs)[:, None])


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x [M, K]` with `weight [N, K]` and add `bias [N]`: `[M, N]`.

    Sums are float32 and rounded once, to the type of `out`, which may be float32 and columns of a wider
    tensor. `proven_tiles` of the matrix is called before a CUDA graph is captured: its first call computes.
    Raises ValueError for rows of another width, TypeError for another format.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if weight.dtype != x.dtype:
        raise TypeError(f"{x.dtype} times {weight.dtype}: both are of one format")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} numbers times weights of {weight.shape[1]}")
    if out.stride(1) != 1:
        raise ValueError("the outputs of a row lie apart")
    if len(x):
        tiles = proven_tiles(x.device, x.dtype, x.shape[1])
        _launch(x, weight, bias, out, _tile_for(len(x), tiles))
    return out


@lru_cache(maxsize=1024)
def proven_tiles(device: torch.device, dtype: torch.dtype, depth: int) -> tuple[int, ...]:
    """Return the places in _TILES that products of this depth use: all, or one if their bits disagree.

    Multiplies random rows by each once, and compares all bits. Float32 has one tile: place -1.
    """
    if dtype == torch.float32:
        return (-1,)
    generator = torch.Generator().manual_seed(depth)
    rows, outputs = _TILES[-1]["ROWS"], _TILES[-1]["BN"]
    x = torch.randn(rows, depth, generator=generator).to(device, dtype)
    weight = torch.randn(outputs, depth, generator=generator).to(device, dtype)
    found = []
    for tile in _TILES:
        out = torch.empty(rows, outputs, device=device)
        _launch(x, weight, None, out, tile)
        found.append(out.view(torch.int32))
    if all(torch.equal(one, found[0]) for one in found[1:]):
        return tuple(range(len(_TILES)))
    _log.warning("products of depth %d differ by tile on %s: one tile serves all rows, slowly", depth, device)
    return (_ONE_TILE,)


def _tile_for(rows: int, places: tuple[int, ...]) -> Tile:
    """Return the smallest of the tiles at `places` that holds `rows`, or the largest."""
    if places == (-1,):
        return _FLOAT32_TILE
    tiles = [_TILES[place] for place in places]
    return next((tile for tile in tiles if rows <= tile["ROWS"]), tiles[-1])


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> None:
    grid = (triton.cdiv(len(x), tile["ROWS"]), triton.cdiv(len(weight), tile["BN"]))
    _invariant_linear[grid](
        check_dense("x", x), check_dense("weight", weight), weight if bias is None else bias, out, len(x),
        len(weight), out.stride(0), K=x.shape[1], BIASED=bias is not None, TYPE=operand_type(x.dtype), **tile,
    )  # fmt: skip
