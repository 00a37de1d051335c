"""Tiles of products by card: an H200's, and what other cards have instead (tiles.json).

An H200's tiles were measured with the matrices of an 8B model's layer, but for those that say otherwise. The
others follow by arithmetic from card_tiles.py, measured on none of them:

- A program holds the tiles that are on their way, a stage fewer than it has (`tile_bytes`), in the memory
  that a card gives one program, less a sixteenth.
- Few rows are a matter of bytes: a multiprocessor holds two programs, so that one waits while the other
  multiplies. H100 has an H200's memory; A100's 164 KiB hold two of the largest, of 60 KiB; L40S and RTX 4090
  with 100 hold two once it has a stage fewer, 40 KiB, and their slower memory wants fewer bytes on their way.
- Many rows are a matter of products: the tile stays as long as one program fits.

A stage more or less and the outputs of a program change no bit of a row. The depth of a step (BK) does: it is
an H200's everywhere, and so are rows. A100 has no FP8; its tiles of FP8 are never used. What may be tried
instead is in tile_candidates.py.

What stands in the tuner's file (tuning.py) goes before all of this, under OPERATOR and the product's name:
outputs, warps and stages, but neither BK, which is a square's side where scales are of squares, nor rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from kernels.gpu.package_tiles import Tile, card_entries, package_tile
from kernels.gpu.tuning import device_name, look_up

_FEW_ROWS = 16
STAYS = ("ROWS", "BK", "AHEAD")
"""Sizes that no tuner changes: they set the order of a sum, or belong to the format."""

OPERATOR = "product"
"""Name of all products in the files of tiles; the class of shapes is a product of `ON_H200`."""

ON_H200: Mapping[str, Tile] = MappingProxyType(
    {product: dict(entry.tile) for product, entry in card_entries("H200", OPERATOR).items()}
)


def card_tile(card: str, product: str) -> Tile:
    """Return the tile of `product`, a key of `ON_H200`, on the card that the driver calls `card`.

    Cards that are not in the file have an H200's. Raises KeyError for another product.
    """
    return {**ON_H200[product], **package_tile(card, OPERATOR, product)}


@lru_cache(maxsize=256)
def _parts(card: str, product: str) -> tuple[Tile, tuple[tuple[str, int], ...]]:
    """Return what of a card's tile stays, and what the tuner's file may change."""
    tile = card_tile(card, product)
    stays = {name: tile[name] for name in tile if name in STAYS}
    return stays, tuple((name, value) for name, value in tile.items() if name not in stays)


def product_tile(device: torch.device, product: str) -> Tile:
    """Return the tile of `product` on a device: the tuner's, else the card's. Raises KeyError as above."""
    stays, default = _parts(_name(device), product)
    return {**stays, **look_up(device, OPERATOR, product, default)}


@lru_cache(maxsize=16)
def _name(device: torch.device) -> str:
    return device_name(device)


def tile_bytes(tile: Mapping[str, int], weight: float, row: float, depth: int) -> int:
    """Return the bytes of weights and rows on their way that a program holds.

    `weight` and `row` are the bytes of a number, `depth` is that of a step where the tile does not say; rows
    are 16 there.
    """
    step = tile.get("BK", depth)
    inside = tile["BN"] * weight + tile.get("ROWS", _FEW_ROWS) * row
    return int(step * inside * (tile["num_stages"] - 1))


def tile_registers(tile: Mapping[str, int]) -> int:
    """Return the registers of a thread that hold the sums of a tile, one of 32 bits each."""
    return tile["BN"] * tile.get("ROWS", _FEW_ROWS) // (32 * tile["num_warps"])
