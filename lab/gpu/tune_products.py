"""Search for the tiles of products on this card: candidates by arithmetic, measured over an 8B model's layer.

Cases are launches of the step's own operators. Which tile of the table a case takes is not written here: the
table says which it was asked for, so that a case counts for each of them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from kernels.gpu import product_tiles
from kernels.gpu.card_tiles import Card
from kernels.gpu.package_tiles import Tile
from kernels.gpu.product_tiles import OPERATOR, STAYS
from kernels.gpu.tile_candidates import product_candidates
from kernels.scaled_matrix import FP8, INT8
from lab.gpu.product_cases import Sizes, expert_work, packed_work, scaled_work, skinny_work
from lab.gpu.section import Context, Unmeasured
from lab.gpu.timing import Work, measure

LAYER: Sizes = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
NARROW: Sizes = ((1024, 4096), (2048, 2048))
LEAST: Sizes = ((512, 2048), (768, 2048))
_DRY: Sizes = ((48, 256),)
_DRY_ROWS = 20
_FEW, _SOME, _MANY = 4, 64, 2048
_ROUNDS = 8


@dataclass(frozen=True)
class Case:
    """A launch over matrices of some sizes; it is made where it is needed, for matrices take memory."""

    name: str
    make: Callable[[torch.device, int, Sizes], list[Work]]
    """Work of each matrix on a device with so many rows."""
    rows: int
    sizes: Sizes


def cases() -> list[Case]:
    """Return the launches that together ask for every product of the table."""
    made = [
        Case("16 bits", skinny_work, _FEW, LAYER),
        Case("FP8 as it is", partial(scaled_work, FP8, rounded=False), _FEW, LAYER),
        Case("FP8", partial(scaled_work, FP8), _FEW, LAYER),
        Case("FP8, many", partial(scaled_work, FP8), _MANY, LAYER),
    ]
    for rows in (_FEW, _SOME, _MANY):
        made.append(Case(f"int8, {rows}", partial(scaled_work, INT8), rows, LAYER))
    for sizes in (LAYER, NARROW, LEAST):
        made.append(Case("int4 codes", partial(packed_work, "int4", 128), _FEW, sizes))
        made.append(Case("int8 codes", partial(packed_work, "int8", 32), _FEW, sizes))
    for group in (32, 128):
        made.append(Case(f"int4 codes of {group}, many", partial(packed_work, "int4", group), _MANY, LAYER))
    return [*made, *(Case(f"experts, {rows}", expert_work, rows, ((1536, 2048),)) for rows in (_FEW, _MANY))]


@contextlib.contextmanager
def tiles_by(choose: Callable[[str, Tile], Mapping[str, int]]) -> Iterator[None]:
    """Let `choose` say what products take, of the name and the tile that they would have."""

    def found(
        device: torch.device, operator: str, product: str, default: Sequence[tuple[str, int]]
    ) -> dict[str, int]:
        own = dict(default)
        return {name: choose(product, own).get(name, value) for name, value in own.items()}

    with mock.patch.object(product_tiles, "look_up", found):
        yield


def products_of(work: Work) -> set[str]:
    """Return the products that a launch asks the table for."""
    asked: set[str] = set()

    def noted(product: str, own: Tile) -> Tile:
        asked.add(product)
        return own

    with tiles_by(noted):
        work()
    return asked


def tune_products(
    context: Context,
    device: torch.device,
    card: Card,
    keep: Callable[[str, str, Tile], None],
    prepare: Callable[[list[tuple[int, str, Tile]]], None],
) -> None:
    """Measure the candidates of every product, and `keep` the fastest: `(operator, product, tile)`.

    `prepare` compiles candidates of cases, by the numbers of these, so that measuring waits for no compiler.
    Raises Unmeasured where a product has no case, or none of its candidates runs.
    """
    everything = cases()
    by_product: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, case in enumerate(everything):
        for place, work in enumerate(_works(context, case, device)):
            for product in products_of(work):
                by_product[product].append((number, place))
    missing = set(product_tiles.ON_H200) - set(by_product)
    if missing and not context.dry:  # small matrices ask for few of them
        raise Unmeasured(f"no case asks for {sorted(missing)}")
    candidates = {
        product: _candidates(context, card, product, [everything[n].sizes[at][0] for n, at in own])
        for product, own in by_product.items()
    }
    prepare([
        (number, product, tile)
        for product, own in by_product.items()
        for number in sorted({number for number, _ in own})
        for tile in candidates[product]
    ])  # fmt: skip
    for product, own in sorted(by_product.items()):
        works = [_works(context, everything[number], device)[at] for number, at in own]
        best = _fastest(context, product, candidates[product], works)
        keep(OPERATOR, product, {name: value for name, value in best.items() if name not in STAYS})
        context.say(f"{product}: {best}")


def run_once(device: torch.device, number: int, product: str, tile: Tile) -> None:
    """Launch a case once with one product's tile: what is compiled stays in Triton's cache."""
    case = cases()[number]
    with tiles_by(partial(_tile_of, product, tile)):
        for work in case.make(device, case.rows, case.sizes):
            work()


def _tile_of(product: str, tile: Tile, name: str, own: Tile) -> Tile:
    """Return what product `name` takes where `product` takes `tile`, and others their own."""
    return tile if name == product else own


def _works(context: Context, case: Case, device: torch.device) -> list[Work]:
    if context.dry:
        return case.make(device, min(case.rows, _DRY_ROWS), _DRY)
    return case.make(device, case.rows, case.sizes)


def _candidates(context: Context, card: Card, product: str, outputs: Sequence[int]) -> list[Tile]:
    found = list(product_candidates(card, product, outputs))
    return found[: context.pick(len(found), len(found), 2)]


def _fastest(context: Context, product: str, candidates: Sequence[Tile], works: Sequence[Work]) -> Tile:
    found: list[tuple[float, int]] = []
    for number, tile in enumerate(candidates):
        with tiles_by(partial(_tile_of, product, tile)):
            named = {str(place): work for place, work in enumerate(works)}
            try:
                times = measure(context, named, rounds=_ROUNDS)
            except Exception as error:
                # Too much shared memory, or nothing that this Triton compiles: not a candidate here.
                context.say(f"{product} {tile}: {type(error).__name__}")
                continue
        found.append((sum(time.median_s for time in times.values()), number))
        context.say(f"{product} {tile}: {found[-1][0] * 1e6:.1f} µs")
    if not found:
        raise Unmeasured(f"no tile of {product} runs")
    return candidates[min(found)[1]]
