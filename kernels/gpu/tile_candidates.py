"""Tiles of products that are worth measuring on a card, by arithmetic over card_tiles.py.

A candidate has the depth and rows of the card's own tile (product_tiles.py says why) and other outputs, warps
and stages. It is left out where

- a program's stages do not fit its memory, less a sixteenth, or its sums take over half of the registers;
- warps would have no square of 16 x 8 of the sums each, or of many rows less than 16 sums a thread;
- of few rows, a multiprocessor could not hold two programs, or all that it holds keep less than half of the
  bytes of weights on their way that its share of the bandwidth moves in a microsecond;
- the smallest matrix would give less than every other multiprocessor a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product as combinations

from kernels.gpu.card_tiles import Card
from kernels.gpu.package_tiles import Tile
from kernels.gpu.product_tiles import card_tile, tile_bytes, tile_registers

_OUTPUTS, _WARPS, _STAGES = (16, 32, 64, 128, 256), (1, 2, 4, 8), (2, 3, 4, 5)
_LEAST_SUMS, _MOST_SUMS = 16, 128
_RESERVED = 1 << 10
"""Bytes of a multiprocessor that each program takes besides (CUDA C++ Programming Guide)."""
_MOST_PROGRAMS = 16
_SQUARE = 16 * 8
_LATENCY_S = 1e-6
_CODES_DEPTH, _FEW_DEPTH = 128, 256
"""Numbers of a step of codes in tiles that do not say: of many rows, and of few."""


def number_bytes(product: str) -> tuple[float, float]:
    """Return the bytes of a number of the weights and of the rows, of a product of the table."""
    if product.startswith(("FP8", "int8")):
        return (1, 2) if "as they are" in product else (1, 1)
    return {"16 bits": 2, "4 bits": 0.5, "8 bits": 1, "codes": 1, "experts": 2}[product.split(",")[0]], 2


def step_depth(product: str) -> int:
    """Return the numbers of a step of a product whose tile does not say."""
    return _CODES_DEPTH if product == "codes, many rows" else _FEW_DEPTH


def product_candidates(card: Card, product: str, outputs: Sequence[int]) -> Iterable[Tile]:
    """Yield the tiles of `product` to measure on `card` for matrices of so many `outputs`, its own first."""
    own = card_tile(card.name, product)
    yield own
    for width, warps, stages in combinations(_OUTPUTS, _WARPS, _STAGES):
        tile = {**own, "BN": width, "num_warps": warps, "num_stages": stages}
        if tile != own and _is_worth_it(card, product, tile, outputs):
            yield tile


def _is_worth_it(card: Card, product: str, tile: Tile, outputs: Sequence[int]) -> bool:
    weight, row = number_bytes(product)
    depth = step_depth(product)
    held = tile_bytes(tile, weight, row, depth)
    sums = tile["BN"] * tile.get("ROWS", 16)
    if held > card.program_memory - card.program_memory // 16 or tile_registers(tile) > _MOST_SUMS:
        return False
    if sums < _SQUARE * tile["num_warps"]:
        return False
    many = "many rows" in product or "some rows" in product
    if not many and any(-(-count // tile["BN"]) < card.multiprocessors // 2 for count in outputs):
        return False
    if many:
        return tile_registers(tile) >= _LEAST_SUMS
    return _keeps_busy(card, tile, weight, held, depth)


def _keeps_busy(card: Card, tile: Tile, weight: float, held: int, depth: int) -> bool:
    """Return whether a multiprocessor has two programs or more, and their weights enough on their way."""
    programs = min(_MOST_PROGRAMS, (card.program_memory + _RESERVED) // (held + _RESERVED))
    on_their_way = programs * tile_bytes(tile, weight, 0, depth)
    return programs >= 2 and on_their_way >= card.share * _LATENCY_S / 2
