"""Products of an 8B model's layer with quantised matrices: each beside its bytes and beside bf16.

Of each kind all four products of a layer are timed, at a decode step's rows and at a prompt's, and first held
against the meaning: a wrong product's time is no figure. About four minutes on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from diptych.engine.backends.triton.operators import Operators, triton_operators
from diptych.engine.backends.triton.products.dense import Linear, library_product
from diptych.engine.backends.triton.products.make import quantised_product
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.products.scaled import FEW_ROWS
from diptych.engine.weights import Matrix
from kernels import packed_matrix, scaled_matrix
from kernels.packed_matrix import PackedMatrix, pack
from kernels.scaled_matrix import FP8, INT8, ScaledMatrix
from lab.gpu.ceilings import READ, ceilings
from lab.gpu.quantised_experts import expert_figures
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure
from lab.gpu.timing import Work, measure

SECTION = "quantised"
_SIZES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
_DRY_SIZES = {"one": (40, 256)}
_ROWS = (1, 16, 64, 2048)
_FOUR_BIT_TARGET = 2.0
"""Speed over that of bf16, at one row."""
_MOST_ERROR = 0.01
"""Distance from the meaning over its norm: bf16 results and another order of sums."""


def quantised(context: Context) -> Iterator[Figure]:
    """Yield figures of each kind of matrix and of experts, and of the ceilings where none were measured."""
    device, operators = device_of(context), triton_operators()
    if READ not in context.measured:
        yield from ceilings(context)
    sizes = context.pick(_SIZES, _SIZES, _DRY_SIZES)
    for name, make in _KINDS.items():
        context.say(f"{name}: making a layer's matrices")
        layer = [_Case.make(size, make, device) for size in sizes.values()]
        for rows in context.pick(_ROWS, (1, 2048), (2,)):
            yield _figure(context, name, layer, rows, operators)
        del layer
    yield from expert_figures(context, device, operators)


def _packed_meaning(x: torch.Tensor, rows: int, weight: PackedMatrix) -> torch.Tensor:
    return packed_matrix.packed_linear(x, weight)


def _scaled_meaning(x: torch.Tensor, rows: int, weight: ScaledMatrix) -> torch.Tensor:
    """Multiply `x [T, columns]` with inputs rounded or not, as those of a step of `rows` rows are."""
    as_they_are = rows <= FEW_ROWS and weight.values.dtype == FP8
    return (scaled_matrix.unrounded_linear if as_they_are else scaled_matrix.scaled_linear)(x, weight)


@dataclass(frozen=True)
class _Case:
    """A matrix of one kind, and one of full numbers of the same size."""

    product: Product
    numbers: torch.Tensor
    """bfloat16 `[outputs, inputs]`."""
    meaning: Callable[[torch.Tensor, int], torch.Tensor]
    """Function of some of a step's rows, and of how many the step has."""

    @classmethod
    def make(cls, size: tuple[int, int], make: Callable[..., Matrix], device: torch.device) -> _Case:
        matrix = make(*size)
        if isinstance(matrix, PackedMatrix):
            moved = matrix.to(device)
            meaning = partial(_packed_meaning, weight=moved)
        elif isinstance(matrix, ScaledMatrix):
            meaning = partial(_scaled_meaning, weight=matrix.to(device))
        else:
            raise TypeError("full numbers are what the others are held against")
        numbers = torch.randn(size, device=device).mul_(size[1] ** -0.5).bfloat16()
        return cls(quantised_product(device, [(matrix, None)]), numbers, meaning)


def _figure(context: Context, name: str, layer: list[_Case], rows: int, operators: Operators) -> Figure:
    context.say(f"{name}: {rows} rows")
    device = layer[0].numbers.device
    inputs = [torch.randn(rows, case.product.inputs, device=device).bfloat16() for case in layer]
    outs = [torch.empty(rows, case.product.outputs, device=device).bfloat16() for case in layer]
    most = max(case.product.room for case in layer)
    room = torch.empty(most, dtype=torch.bfloat16, device=device) if most else None
    for case, x, out in zip(layer, inputs, outs, strict=True):
        case.product.multiply(operators, x, room, out=out)
        expected = case.meaning(x[:16], rows)
        wrong = float((out[:16].float() - expected).norm() / expected.norm())
        if wrong > (1.0 if context.dry else _MOST_ERROR):  # the interpreter cuts bfloat16 off
            raise Unmeasured(f"{name}, {rows} rows: {wrong:.3g} of the norm away from the meaning")

    def ours() -> None:
        for case, x, out in zip(layer, inputs, outs, strict=True):
            case.product.multiply(operators, x, room, out=out)

    def full() -> None:
        for case, x, out in zip(layer, inputs, outs, strict=True):
            if rows <= 16:
                operators.skinny_linear(x, case.numbers, None, out=out)
            else:
                library_product(x, Linear(case.numbers, None), out)

    works: dict[str, Work] = {"quantised": ours, "bf16": full}
    times = measure(context, works)
    mine, other = times["quantised"], times["bf16"]
    nbytes = sum(case.product.nbytes for case in layer)
    limit = nbytes / context.needs(READ)
    four = rows == 1 and "4 bits" in name
    return figure(
        SECTION, f"a layer's products, {name}, {rows} rows", mine.median_s * 1e6, "µs",
        against="bf16", ratio=other.median_s / mine.median_s, at_least=_FOUR_BIT_TARGET if four else None,
        note=f"{limit * 1e6:.0f} µs by its bytes, bf16 {other.median_s * 1e6:.0f} µs, {mine.note()}",
    )  # fmt: skip


def _codes(rows: int, columns: int, most: int) -> torch.Tensor:
    codes = torch.randint(0, most, (rows, columns), dtype=torch.uint8)
    codes[0, :2] = torch.tensor([0, most - 1])
    return codes


def _four_bits(rows: int, columns: int, *, group: int, ordered: bool = False) -> PackedMatrix:
    groups = columns // group
    scales = torch.rand(rows, groups).mul_(0.2 * columns**-0.5).half()
    zeros = torch.randint(6, 10, (rows, groups))
    of = (torch.arange(columns) // group)[torch.randperm(columns)] if ordered else None
    return _made(pack("int4", _codes(rows, columns, 16), scales, group, zeros=zeros, group_of=of))


def _nf4(rows: int, columns: int) -> PackedMatrix:
    peaks = torch.rand(rows, columns // 64).mul_(2 * columns**-0.5)
    return _made(pack("table4", _codes(rows, columns, 16), peaks, 64, table=torch.linspace(-1, 1, 16)))


def _eight_bits(rows: int, columns: int) -> PackedMatrix:
    scales = torch.rand(rows, columns // 32).mul_(0.02 * columns**-0.5).half()
    return _made(pack("int8", _codes(rows, columns, 256), scales, 32, zero=128))


def _made(matrix: PackedMatrix | None) -> PackedMatrix:
    assert matrix is not None
    return matrix


def _squares(rows: int, columns: int) -> ScaledMatrix:
    values = torch.randn(rows, columns).to(FP8)
    return ScaledMatrix(values, torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1, squares=True)


def _rounded(rows: int, columns: int, *, dtype: torch.dtype) -> ScaledMatrix:
    return scaled_matrix.quantise(torch.randn(rows, columns).mul_(columns**-0.5), dtype)


_KINDS: dict[str, Callable[..., Matrix]] = {
    "4 bits, groups of 128": partial(_four_bits, group=128),
    "4 bits, groups of 32": partial(_four_bits, group=32),
    "4 bits, groups of 128, reordered": partial(_four_bits, group=128, ordered=True),
    "NF4": _nf4,
    "8 bits, groups of 32": _eight_bits,
    "FP8": partial(_rounded, dtype=FP8),
    "FP8 in squares": _squares,
    "int8": partial(_rounded, dtype=INT8),
}
