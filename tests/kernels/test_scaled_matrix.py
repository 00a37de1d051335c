"""Matrices whose inputs are rounded like themselves: rounding, joining, and their numbers."""

from __future__ import annotations

import pytest
import torch

from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import (
    FP8,
    INT8,
    ScaledMatrix,
    dequantise,
    join,
    quantise,
    round_rows,
    scaled_linear,
    weights_only,
)


def squares(rows: int, columns: int) -> ScaledMatrix:
    torch.manual_seed(rows)
    values = torch.randn(rows, columns).to(FP8)
    return ScaledMatrix(values, torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1, squares=True)


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 0.04), (INT8, 0.012)])
def test_products_are_near_those_of_full_numbers(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(2)
    x, matrix = torch.randn(5, 300), torch.randn(40, 300)
    expected = x @ matrix.T
    got = scaled_linear(x, quantise(matrix, dtype))
    assert 0 < (got - expected).norm() / expected.norm() < most


def test_rows_have_the_scale_of_their_own_numbers_or_a_fixed_one() -> None:
    x = torch.tensor([[1.0, -448.0], [0.5, 0.25], [0.0, 0.0]])
    values, scales = round_rows(x, FP8)
    assert scales.flatten()[:2].tolist() == pytest.approx([1.0, 0.5 / 448])
    assert values[2].float().tolist() == [0.0, 0.0]
    values, scales = round_rows(x, FP8, static=torch.tensor([0.25]))
    assert scales.flatten().tolist() == [0.25] * 3
    assert values[0].float().tolist() == [4.0, -448.0], "what does not fit is clipped"


def test_each_128_numbers_of_a_row_have_a_scale_with_squares() -> None:
    x = torch.cat([torch.ones(1, 128), torch.full((1, 72), 100.0)], dim=1)
    values, scales = round_rows(x, FP8, squares=True)
    assert scales.flatten().tolist() == pytest.approx([1 / 448, 100 / 448])
    assert bool((values.float() == 448).all())


@pytest.mark.parametrize("matrix", [squares(130, 200), quantise(torch.randn(7, 200), INT8)])
def test_codes_for_inputs_that_are_not_rounded_stand_for_the_same_numbers(matrix: ScaledMatrix) -> None:
    assert torch.equal(packed_matrix.dequantise(weights_only(matrix)), dequantise(matrix))


def test_rows_that_cut_squares_become_codes() -> None:
    matrix = squares(300, 130)
    kept, cut = matrix.rows(slice(128, 300)), matrix.rows(slice(100, 200))
    assert isinstance(kept, ScaledMatrix)
    assert torch.equal(dequantise(kept), dequantise(matrix)[128:])
    assert isinstance(cut, PackedMatrix)
    assert torch.equal(packed_matrix.dequantise(cut), dequantise(matrix)[100:200])


def test_columns_that_cut_squares_become_codes() -> None:
    matrix = squares(200, 384)
    whole = matrix.cut(slice(128, 384))
    assert isinstance(whole, ScaledMatrix)
    assert torch.equal(dequantise(whole), dequantise(matrix)[:, 128:])
    cut = matrix.cut(slice(64, 320))
    assert isinstance(cut, PackedMatrix)
    assert torch.equal(packed_matrix.dequantise(cut), dequantise(matrix)[:, 64:320])


def test_columns_of_outputs_scales_are_cut_anywhere() -> None:
    matrix = quantise(torch.randn(7, 200), INT8)
    cut = matrix.cut(slice(3, 101))
    assert isinstance(cut, ScaledMatrix)
    assert torch.equal(dequantise(cut), dequantise(matrix)[:, 3:101])


def test_joined_matrices_have_the_largest_fixed_scale() -> None:
    parts = [quantise(torch.randn(3, 16), FP8) for _ in range(2)]
    fixed = [
        ScaledMatrix(p.values, p.scales, static=torch.tensor([s]))
        for p, s in zip(parts, (0.5, 0.2), strict=True)
    ]
    joined = join(fixed)
    assert joined is not None
    assert joined.static is not None
    assert joined.static.tolist() == [0.5]
    assert torch.equal(dequantise(joined), torch.cat([dequantise(part) for part in parts]))
    assert join([parts[0], fixed[1]]) is None
    assert join([squares(100, 128), squares(128, 128)]) is None, "a square would have rows of both"
    assert join([squares(128, 128), squares(100, 128)]) is not None


def test_squares_of_int8_are_refused() -> None:
    one = squares(130, 128)
    with pytest.raises(ValueError, match=r"squares of scales are of FP8, not of torch\.int8"):
        ScaledMatrix(one.values.view(INT8), one.scales, squares=True)
