"""Tiles that the package brings for cards by name: tiles.json, each measured or by arithmetic, and why.

The file is `{card: {operator: {class of shapes: entry}}}`; cards are those of card_tiles.py, operators and
classes those of tuning.py and product_tiles.py. `python -m lab.gpu.tune --package` writes what it measures.
What a user's own file has (tuning.py) goes before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernels.gpu.card_tiles import card_of

FILE = Path(__file__).with_name("tiles.json")
Tile = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """A tile of one operator for one class of shapes on one card."""

    tile: Mapping[str, int]
    measured: bool
    """Found on the card; else it follows by arithmetic from another's."""
    why: str = ""


Table = Mapping[str, Mapping[str, Entry]]
"""Entries of a card by operator and class of shapes."""


def read_tiles(path: Path = FILE) -> dict[str, Table]:
    """Read the entries of all cards. Raises ValueError, with the place, for a file of another form."""
    return {
        card: {
            operator: {
                shapes: _entry(f"{card}, {operator}, {shapes}", found) for shapes, found in own.items()
            }
            for operator, own in operators.items()
        }
        for card, operators in json.loads(path.read_text()).items()
    }


def _entry(place: str, found: Any) -> Entry:
    match found:
        case {"tile": dict(tile), "measured": bool(measured), **more}:
            pass
        case _:
            raise ValueError(f"{FILE.name}: {place} has no tile, or does not say whether it was measured")
    if set(more) - {"why"} or not all(type(value) is int and value >= 0 for value in tile.values()):
        raise ValueError(
            f"{FILE.name}: {place} has {found}: sizes are whole numbers, and nothing else is said"
        )
    return Entry(tile, measured, str(more.get("why", "")))


@lru_cache(maxsize=1)
def _tiles() -> dict[str, Table]:
    return read_tiles()


def card_entries(card: str, operator: str) -> Mapping[str, Entry]:
    """Return the entries of `operator` on the card that the driver calls `card`; empty for another card."""
    found = card_of(card)
    return {} if found is None else _tiles().get(found.name, {}).get(operator, {})


def package_tile(card: str, operator: str, shapes: str) -> Mapping[str, int]:
    """Return the tile of a class of shapes on the card that the driver calls `card`; empty where none is."""
    entry = card_entries(card, operator).get(shapes)
    return {} if entry is None else entry.tile


def write_measured(card: str, operator: str, shapes: str, tile: Mapping[str, int], path: Path = FILE) -> None:
    """Write a tile that was measured on the card that the driver calls `card`, over what its entry said.

    Raises ValueError for a card that is not in card_tiles.py, OSError.
    """
    found = card_of(card)
    if found is None:
        raise ValueError(f"{card} is no card of kernels/gpu/card_tiles.py")
    everything = json.loads(path.read_text())
    own = everything.setdefault(found.name, {}).setdefault(operator, {})
    before = own.get(shapes, {}).get("tile", {})
    own[shapes] = {"tile": {**before, **tile}, "measured": True, "why": "found by lab.gpu.tune"}
    path.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")
    _tiles.cache_clear()
