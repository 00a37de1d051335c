"""Candidates of products' tiles: the card's own first, and none that arithmetic rules out."""

from __future__ import annotations

import pytest

from kernels.gpu.card_tiles import CARDS, Card
from kernels.gpu.product_tiles import ON_H200, STAYS, card_tile, tile_bytes
from kernels.gpu.tile_candidates import number_bytes, product_candidates, step_depth

OUTPUTS = (6144, 4096, 28_672)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_candidates_fit_the_card_and_keep_the_order_of_sums(card: Card) -> None:
    for product in ON_H200:
        own, *others = product_candidates(card, product, OUTPUTS)
        assert own == card_tile(card.name, product)
        assert others, product
        assert len({tuple(tile.items()) for tile in (own, *others)}) == len(others) + 1
        for tile in others:
            held = tile_bytes(tile, *number_bytes(product), step_depth(product))
            assert held <= card.program_memory
            assert {name: tile.get(name) for name in STAYS} == {name: own.get(name) for name in STAYS}


def test_small_matrices_have_small_tiles_and_slow_memory_fewer_bytes() -> None:
    h200, _, _, l40s, _ = CARDS
    product = "16 bits, few rows, short"
    widths = {tile["BN"] for tile in product_candidates(h200, product, OUTPUTS)}
    small = {tile["BN"] for tile in list(product_candidates(h200, product, (1024,)))[1:]}
    assert max(small, default=0) < max(widths)
    shallow = {
        card.name: min(tile["num_stages"] * tile["BN"] for tile in product_candidates(card, product, OUTPUTS))
        for card in (h200, l40s)
    }
    assert shallow["L40S"] <= shallow["H200"]
