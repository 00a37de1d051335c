"""Tiles of products by card: each fits, an H200's are what was measured, and the tuner's file goes first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.gpu import product_tiles, tuning
from kernels.gpu.card_tiles import CARDS, Card
from kernels.gpu.product_tiles import (
    ON_H200,
    OPERATOR,
    OTHERS,
    card_tile,
    product_tile,
    tile_bytes,
    tile_registers,
)

_RESERVED = 1 << 10
"""Bytes of a multiprocessor that each program takes besides (CUDA C++ Programming Guide)."""
_SUMS = 128
"""Registers of a thread's 255 that sums may have."""
BYTES = {"16 bits": (2, 2), "4 bits": (0.5, 2), "8 bits": (1, 2), "codes": (1, 2), "experts": (2, 2)}
"""Bytes of a number of the weights and of the rows; of the rest both are one."""


def held(card: Card, product: str, **changed: int) -> int:
    depth = 128 if product == "codes, many rows" else 256
    sizes = (1, 2) if "as they are" in product else (1, 1)
    return tile_bytes(
        {**card_tile(card.name, product), **changed}, *BYTES.get(product.split(",")[0], sizes), depth
    )


def programs(card: Card, product: str, **changed: int) -> int:
    """Return how many programs a multiprocessor has memory for."""
    return (card.program_memory + _RESERVED) // (held(card, product, **changed) + _RESERVED)


@pytest.mark.parametrize("product", ON_H200)
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_tile_fits_its_card(card: Card, product: str) -> None:
    assert held(card, product) <= card.program_memory - card.program_memory // 16
    assert tile_registers(card_tile(card.name, product)) <= _SUMS
    if "few rows" in product:
        assert programs(card, product) >= 2


def test_an_h200_s_tile_would_leave_a_smaller_card_one_program() -> None:
    changed = {name: product for name, table in OTHERS.items() for product in table}
    assert changed == dict.fromkeys(("L40S", "RTX 4090"), "16 bits, few rows, tall")
    for card in CARDS:
        if (product := changed.get(card.name)) is not None:
            assert programs(card, product, **ON_H200[product]) == 1


def test_every_card_has_a_row_and_an_unknown_one_an_h200_s() -> None:
    assert {card.name for card in CARDS if not card.measured} == set(OTHERS)
    for product, tile in ON_H200.items():
        assert card_tile("NVIDIA H200", product) == card_tile("an unknown card", product) == tile
    assert all(product in ON_H200 for table in OTHERS.values() for product in table)
    assert card_tile("NVIDIA L40S", "16 bits, few rows, tall")["num_stages"] == 3


def test_no_card_changes_the_order_of_a_sum() -> None:
    for card in CARDS:
        for product, tile in ON_H200.items():
            found = card_tile(card.name, product)
            assert found.keys() == tile.keys()
            assert {name: found.get(name) for name in ("BK", "ROWS")} == {
                name: tile.get(name) for name in ("BK", "ROWS")
            }


def test_the_tuner_s_file_goes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.FILE_VARIABLE, str(tmp_path / "found.json"))
    for module in (tuning, product_tiles):
        monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA L40S")
    device, product = torch.device("cpu"), "16 bits, few rows, tall"
    caches = tuning.look_up, product_tiles._name
    for cache in caches:
        cache.cache_clear()
    assert product_tile(device, product) == {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3}
    tuning.keep(device, OPERATOR, product, {"num_stages": 2, "BN": 32, "BK": 64})
    assert product_tile(device, product) == {"BN": 32, "BK": 128, "num_warps": 4, "num_stages": 2}
    assert product_tile(device, "16 bits, few rows, short") == ON_H200["16 bits, few rows, short"]
    for cache in caches:
        cache.cache_clear()


def test_another_product_is_no_tile() -> None:
    with pytest.raises(KeyError, match="3 bits"):
        product_tile(torch.device("cpu"), "3 bits")
