"""Tiles of products that are kept in the package by card: an H200's, and what other cards have instead.

An H200's tiles were measured with the matrices of an 8B model's layer, but for those that say otherwise. The
others follow by arithmetic from card_tiles.py, measured on none of them:

- A program holds the tiles that are on their way, a stage fewer than it has (`tile_bytes`), in the memory
  that a card gives one program, less a sixteenth.
- Few rows are a matter of bytes: a multiprocessor holds two programs, so that one waits while the other
  multiplies. H100 has an H200's memory; A100's 164 KiB hold two of the largest, of 60 KiB; L40S and RTX 4090
  with 100 hold two once it has a stage fewer, 40 KiB, and their slower memory wants fewer bytes on their way.
- Many rows are a matter of products: the tile stays as long as one program fits.

A stage more or less and the outputs of a program change no bit of a row. The depth of a step (BK) does: it is
an H200's everywhere, and so are rows. A100 has no FP8; its tiles of FP8 are never used.

What stands in the tuner's file (tuning.py) goes before all of this, under OPERATOR and the product's name:
outputs, warps and stages, but neither BK, which is a square's side where scales are of squares, nor rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from kernels.gpu.card_tiles import card_of
from kernels.gpu.tuning import device_name, look_up

Tile = dict[str, int]

_FEW_ROWS = 16
_STAYS = ("ROWS", "BK", "AHEAD")

OPERATOR = "product"
"""Name of all products in the tuner's file; the class of shapes is a product of `ON_H200`."""

ON_H200: Mapping[str, Tile] = MappingProxyType(
    {
        # Nearest to the bandwidth: the tall one to 91% and 99% of it (N = 28,672 and 128,256), the short one
        # to 52% to 78% where there is less to read, and more programs fill the device sooner.
        "16 bits, few rows, short": {"BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
        "16 bits, few rows, tall": {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4},
        # Best for all four products of an 8B layer together, in groups of 128 and 32 and in NF4. The narrower
        # ones by arithmetic: a program for every other multiprocessor at least.
        "4 bits, few rows, wide": {"ROWS": 16, "BN": 64, "AHEAD": 1, "num_warps": 4, "num_stages": 4},
        "4 bits, few rows, narrow": {"ROWS": 16, "BN": 32, "AHEAD": 1, "num_warps": 2, "num_stages": 4},
        "4 bits, few rows, least": {"ROWS": 16, "BN": 16, "AHEAD": 1, "num_warps": 2, "num_stages": 4},
        "8 bits, few rows, wide": {"ROWS": 16, "BN": 64, "AHEAD": 1, "num_warps": 4, "num_stages": 3},
        "8 bits, few rows, narrow": {"ROWS": 16, "BN": 32, "AHEAD": 1, "num_warps": 2, "num_stages": 3},
        "8 bits, few rows, least": {"ROWS": 16, "BN": 16, "AHEAD": 1, "num_warps": 2, "num_stages": 3},
        # By arithmetic: inputs of all stages fit the memory of any card.
        "codes, many rows": {"ROWS": 64, "BN": 64, "AHEAD": 0, "num_warps": 4, "num_stages": 3},
        "codes, many rows, long runs": {"ROWS": 64, "BN": 64, "AHEAD": 0, "num_warps": 4, "num_stages": 2},
        "FP8, few rows": {"ROWS": 16, "BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
        # By arithmetic (scaled_linear.py).
        "FP8, few rows as they are, wide": {"ROWS": 16, "BN": 32, "BK": 256, "num_warps": 4, "num_stages": 3},
        "FP8, few rows as they are, narrow": {
            "ROWS": 16,
            "BN": 16,
            "BK": 256,
            "num_warps": 2,
            "num_stages": 4,
        },
        # By arithmetic.
        "int8 or squares, few rows": {"ROWS": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 3},
        "FP8, many rows": {"ROWS": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3},
        "int8, some rows": {"ROWS": 64, "BN": 64, "BK": 256, "num_warps": 4, "num_stages": 3},
        "int8, many rows": {"ROWS": 128, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 3},
        # By arithmetic.
        "experts, few rows": {"ROWS": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 3},
        "experts, many rows": {"ROWS": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    }
)

_SMALL: Mapping[str, Tile] = MappingProxyType({"16 bits, few rows, tall": {"num_stages": 3}})
"""Cards of 99 KiB a program, 100 KiB a multiprocessor."""

OTHERS: Mapping[str, Mapping[str, Tile]] = MappingProxyType(
    {"H100": {}, "A100": {}, "L40S": _SMALL, "RTX 4090": _SMALL}
)
"""Tiles of cards of card_tiles.py in place of an H200's numbers."""


def card_tile(card: str, product: str) -> Tile:
    """Return the tile of `product`, a key of `ON_H200`, on the card that the driver calls `card`.

    Cards that are not here have an H200's. Raises KeyError for another product.
    """
    found = card_of(card)
    return {**ON_H200[product], **(OTHERS.get(found.name, {}).get(product, {}) if found else {})}


@lru_cache(maxsize=256)
def _parts(card: str, product: str) -> tuple[Tile, tuple[tuple[str, int], ...]]:
    """Return what of a card's tile stays, and what the tuner's file may change."""
    tile = card_tile(card, product)
    stays = {name: tile[name] for name in tile if name in _STAYS}
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
