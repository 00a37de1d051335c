"""FP8 and int8 products on the GPU: the reference's rounding and numbers, a row's bits whatever stands by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import scaled_matrix
from kernels.gpu.round_rows import round_rows
from kernels.gpu.scaled_linear import FEW_ROWS, MANY_ROWS, choose_tile, scaled_linear
from kernels.scaled_matrix import FP8, INT8, ScaledMatrix, quantise
from tests.kernels.gpu.paged import error
from tests.kernels.test_scaled_matrix import squares

BOUND = 2e-6
"""Relative to the norm, in float32: the order of sums."""


def cases() -> dict[str, ScaledMatrix]:
    torch.manual_seed(1)
    rows = quantise(torch.randn(40, 200), FP8)
    return {
        "fp8": rows,
        "fp8, inputs by a fixed scale": replace(rows, static=torch.tensor([0.01])),
        "fp8, squares": squares(140, 264),
        "int8": quantise(torch.randn(37, 136), INT8),
    }


CASES = cases()


def multiply(x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    rounded, scales = round_rows(x, weight.values.dtype, squares=weight.squares, static=weight.static)
    out = torch.empty(len(x), weight.shape[0], device=x.device)
    return scaled_linear(rounded, scales, weight, bias, out=out)


@pytest.mark.parametrize("name", CASES)
def test_rounding_and_products_equal_the_reference(name: str, device: torch.device) -> None:
    """The reference is the CPU's: torch divides by a number as a product with its reciprocal on a GPU."""
    weight = CASES[name]
    for rows in (3, FEW_ROWS + 2, 2 * MANY_ROWS + 1):
        x = torch.randn(rows, weight.shape[1]) * torch.rand(rows, 1)
        how = {"squares": weight.squares, "static": weight.static}
        expected = scaled_matrix.round_rows(x, weight.values.dtype, **how)
        moved = weight.to(device)
        got = round_rows(x.to(device), weight.values.dtype, squares=weight.squares, static=moved.static)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.float().cpu(), theirs.float())
        bias = torch.randn(weight.shape[0])
        product = multiply(x.to(device), moved, bias.to(device)).cpu()
        assert error(product, scaled_matrix.scaled_linear(x, weight, bias)) < BOUND


def numbers_and_middles() -> torch.Tensor:
    """Return each number of E4M3, each middle of two, what lies beside the middles, and what is too large."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[~numbers.isnan()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [middles * (1 + sign * 2.0**-22) for sign in (-1, 1)]
    return torch.cat([numbers, middles, *beside, torch.tensor([449.0, 464.0, 500.0, 1e30, -1e30])])


def test_every_number_of_fp8_and_every_middle_rounds_to_even(device: torch.device) -> None:
    x = numbers_and_middles()[None]
    got, _ = round_rows(x.to(device), FP8, static=torch.ones(1, device=device))
    expected = x.clamp(-448, 448).to(FP8)
    assert torch.equal(got.cpu().float(), expected.float())
    away = (x * (1 + 2.0**-21)).clamp(-448, 448).to(FP8)  # the control: middles go the other way
    assert not torch.equal(got.cpu().float(), away.float())


def test_scales_of_squares_lie_group_after_group(device: torch.device) -> None:
    x = torch.randn(5, 3 * 128 + 7).to(device)
    values, scales = round_rows(x, FP8, squares=True)
    assert scales.shape == (5, 4)
    assert scales.stride() == (1, 8)
    weight = CASES["fp8, squares"].to(device)
    values, scales = round_rows(torch.randn(5, weight.shape[1]).to(device), FP8, squares=True)
    out = [torch.empty(5, weight.shape[0], device=device) for _ in range(2)]
    for one, given in zip(out, (scales, scales.contiguous()), strict=True):
        scaled_linear(values, given, weight, out=one)
    assert torch.equal(*out)


def test_large_tiles_of_int8_are_for_products_that_fill_the_card() -> None:
    whole, floats = (replace_size(CASES[name], 4096) for name in ("int8", "fp8"))
    assert choose_tile(floats, 16, 132)["BN"] == 16
    assert choose_tile(whole, 64, 132)["ROWS"] == MANY_ROWS
    assert choose_tile(whole, 512, 132)["ROWS"] == MANY_ROWS  # 32 x 4 programs
    assert choose_tile(whole, 2048, 132)["ROWS"] == 2 * MANY_ROWS


def replace_size(weight: ScaledMatrix, rows: int) -> ScaledMatrix:
    values = torch.empty(rows, weight.shape[1], dtype=weight.values.dtype)
    return ScaledMatrix(values, torch.empty(rows, 1))


@pytest.mark.parametrize("name", ["fp8", "fp8, squares", "int8"])
def test_a_row_has_the_same_bits_among_few_and_among_many(name: str, device: torch.device) -> None:
    weight = CASES[name].to(device)
    x = torch.randn(MANY_ROWS + 3, weight.shape[1]).to(device)
    few, many = multiply(x[:FEW_ROWS], weight), multiply(x, weight)
    assert torch.equal(multiply(x[:1], weight), few[:1])
    assert torch.equal(multiply(x[-FEW_ROWS - 1 :], weight), many[-FEW_ROWS - 1 :])


def test_a_scale_of_another_square_shows(device: torch.device) -> None:
    weight = CASES["fp8, squares"].to(device)
    x = torch.randn(3, weight.shape[1])
    shifted = replace(weight, scales=weight.scales.roll(1, 1).contiguous())
    expected = scaled_matrix.scaled_linear(x, CASES["fp8, squares"])
    assert error(multiply(x.to(device), shifted).cpu(), expected) > 1000 * BOUND


@pytest.mark.parametrize("name", ["fp8", "fp8, squares"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_of_fp8_are_multiplied_as_they_are(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, bias = CASES[name], torch.randn(CASES[name].shape[0])
    x = (torch.randn(FEW_ROWS, weight.shape[1]) * 300).to(dtype)
    expected = scaled_matrix.unrounded_linear(x, weight, bias)
    out = torch.empty(FEW_ROWS, weight.shape[0], device=device)
    moved = weight.to(device)
    got = scaled_linear(x.to(device), None, moved, bias.to(device), out=out.clone())
    assert error(got.cpu(), expected) < BOUND
    one = scaled_linear(x[3:4].to(device), None, moved, bias.to(device), out=out[:1].clone())
    assert torch.equal(one[0], got[3])
    assert error(multiply(x.float().to(device), moved, bias.to(device)).cpu(), expected) > 1000 * BOUND
    with pytest.raises(ValueError, match="17 rows as they are; 16 at most"):
        scaled_linear(x.repeat(2, 1)[:17].to(device), None, moved, out=out)


def test_rows_of_another_format_are_refused(device: torch.device) -> None:
    weight = CASES["int8"].to(device)
    x, scales = round_rows(torch.ones(1, 136, device=device), FP8)
    with pytest.raises(TypeError, match=r"rows of .*e4m3fn times a matrix of .*int8"):
        scaled_linear(x, scales, weight, out=torch.empty(1, 37, device=device))
    with pytest.raises(TypeError, match=r"rows of .*float32 times a matrix of .*int8"):
        scaled_linear(torch.ones(1, 136, device=device), None, weight, out=torch.empty(1, 37, device=device))
