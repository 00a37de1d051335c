"""8-bit matrices and rows in segments: against what rounding allows, and against whole numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.byte_linear import ByteMatrix, dequantise, linear, quantise_matrix, quantise_rows, segments


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("columns", "cut"),
    [
        (1, (1, 32)),
        (31, (1, 32)),
        (256, (1, 256)),
        (257, (1, 288)),
        (576, (1, 576)),
        (577, (2, 320)),
        (900, (2, 480)),
        (1536, (3, 512)),
        (2049, (4, 544)),
    ],
)
def test_segments_cut_rows_evenly(columns: int, cut: tuple[int, int]) -> None:
    assert segments(columns) == cut
    for width in range(1, 5000, 7):
        count, wide = segments(width)
        assert wide <= 576
        assert wide % 32 == 0
        assert (count - 1) * wide < width <= count * wide


@pytest.mark.parametrize("columns", [1, 31, 33, 576, 577, 1152])
def test_a_quantised_matrix_is_within_half_a_step(columns: int) -> None:
    numbers = random(5, columns) * torch.logspace(-6, 2, 5).unsqueeze(1)
    numbers[2] = 0.0
    matrix = quantise_matrix(numbers)
    count, width = segments(columns)
    assert matrix.shape == (5, columns)
    assert matrix.values.abs().max() == 127
    peaks = functional.pad(numbers, (0, count * width - columns)).view(5, count, width).abs().amax(dim=-1)
    assert torch.equal(matrix.scales, peaks / 127)
    steps = matrix.scales.repeat_interleave(width, dim=1)[:, :columns]
    back = dequantise(matrix)
    assert ((back - numbers).abs() <= 0.5001 * steps).all()
    assert (back[2] == 0).all()


def test_four_outliers_of_a_segment_cost_the_others_nothing() -> None:
    x = random(3, 1024)
    plain = quantise_rows(x)[1]
    wide = x.clone()
    wide[1, [0, 122, 260, 511]] = torch.tensor([90.0, -70.0, 55.0, 81.0])  # four lines of the first segment
    values, scales = quantise_rows(wide)
    assert torch.equal(scales[[0, 2]], plain[[0, 2]])
    ordinary = x[1].view(2, 512).abs().amax(dim=1)
    assert (scales[1].flatten() <= ordinary / 127).all()
    error = ((values.float() * scales).flatten(1) - wide).abs()
    assert (error <= 0.5001 * scales.expand(-1, -1, 512).flatten(1)).all()
    assert values[1, 0].abs().max() > 3000
    assert values[[0, 2]].abs().max() > 127  # the widest lines of an ordinary segment reach a little further


def test_a_fifth_outlier_sets_the_scale() -> None:
    x = random(1, 256)
    x[0, [0, 40, 80, 120, 160]] = 100.0
    _, scales = quantise_rows(x)
    torch.testing.assert_close(scales, torch.tensor([[[100.0 / 127]]]), rtol=1e-4, atol=0)


def test_neighbours_of_an_outlier_have_sixteen_bits_with_it() -> None:
    x = random(1, 256).clamp(-1, 1)
    x[0, 8:12] = torch.tensor([50.0, 40.0, 30.0, 20.0])
    values, scales = quantise_rows(x)
    assert scales.item() <= 1.0001 / 127
    assert values[0, 0, 8:12].abs().min() > 2000
    assert (values[0, 0].abs() > 127).sum() <= 16


def test_an_outlier_beyond_sixteen_bits_sets_the_scale() -> None:
    x = random(1, 256)
    x[0, 100] = 1e6
    values, scales = quantise_rows(x)
    assert values.abs().max() == 127 * 256
    torch.testing.assert_close(scales, torch.full((1, 1, 1), 1e6 / 127 / 256), rtol=1e-4, atol=0)


def test_only_outlier_columns_leave_eight_bits() -> None:
    values, _ = quantise_rows(random(64, 1024, seed=3) * random(64, 1024, seed=4).exp())
    lines = values.unflatten(-1, (-1, 4)).abs().amax(dim=-1)
    assert ((lines > 127).sum(dim=-1) <= 4).all()
    assert (lines > 127).any()


def test_rows_that_are_not_finite_or_vanish() -> None:
    x = random(4, 300)
    x[0, 3] = torch.inf
    x[1, 299] = torch.nan
    x[2] = 1e-38
    weight = random(6, 300, seed=2)
    y = linear(x, weight)
    assert y[:2].isnan().all()
    assert (y[2].abs() < 1e-30).all()
    assert (y[3] - functional.linear(x[3], weight)).abs().max() < 0.7


def test_a_linear_layer_is_near_to_the_exact_one() -> None:
    x, weight, bias = random(8, 600), random(50, 600, seed=3), random(50, seed=4)
    exact = functional.linear(x, weight, bias)
    error = (linear(x, dequantise(quantise_matrix(weight)), bias) - exact).norm() / exact.norm()
    assert 0.001 < error < 0.02


def test_matrices_whose_parts_do_not_fit_are_refused() -> None:
    values = torch.zeros((2, 300), dtype=torch.int8)
    with pytest.raises(ValueError, match="int8"):
        ByteMatrix(values.float(), torch.ones(2, 1))
    with pytest.raises(ValueError, match="300 columns"):
        ByteMatrix(values, torch.ones(2, 3))
