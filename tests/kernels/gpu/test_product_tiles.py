"""Tiles of products by card: each fits, an H200's are what was measured, and the tuner's file goes first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.gpu import product_tiles, tuning
from kernels.gpu.card_tiles import CARDS, Card
from kernels.gpu.package_tiles import FILE, package_tile, read_tiles, write_measured
from kernels.gpu.product_tiles import (
    ON_H200,
    OPERATOR,
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
    changed = {
        (card.name, product) for card in CARDS for product in ON_H200
        if card_tile(card.name, product) != ON_H200[product]
    }  # fmt: skip
    product = "16 bits, few rows, tall"
    assert changed == {("L40S", product), ("RTX 4090", product)}
    for card in CARDS:
        if (card.name, product) in changed:
            assert programs(card, product, **ON_H200[product]) == 1


def test_every_card_has_a_row_and_an_unknown_one_an_h200_s() -> None:
    tables = read_tiles()
    assert list(tables) == [card.name for card in CARDS]
    for card, table in tables.items():
        assert table.keys() == {"paged_decode", "paged_prefill", OPERATOR}
        assert table[OPERATOR].keys() == ON_H200.keys()
        measured = [entry.measured for own in table.values() for entry in own.values()]
        assert any(measured) == (card == "H200"), "what no card measured says so"
    for product, tile in ON_H200.items():
        assert card_tile("NVIDIA H200", product) == card_tile("an unknown card", product) == tile
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


def test_what_was_measured_is_written_for_its_card_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(FILE.read_text())
    product = "experts, many rows"
    write_measured("NVIDIA L40S", OPERATOR, product, {"BN": 32}, path)
    before, after = read_tiles(), read_tiles(path)
    found = after["L40S"][OPERATOR][product]
    assert found.measured
    assert found.tile == {**before["L40S"][OPERATOR][product].tile, "BN": 32}
    assert after["H200"] == before["H200"]
    with pytest.raises(ValueError, match="NVIDIA T4 is no card"):
        write_measured("NVIDIA T4", OPERATOR, product, {}, path)
    assert package_tile("NVIDIA T4", OPERATOR, product) == {}


@pytest.mark.parametrize(
    "entry", ['{"tile": {"BN": 16}}', '{"tile": {"BN": "16"}, "measured": true}', "16"], ids=str
)
def test_entries_that_say_something_else_are_refused(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text('{"H200": {"product": {"int8, many rows": ' + entry + "}}}")
    with pytest.raises(ValueError, match="H200, product, int8, many rows has"):
        read_tiles(path)
