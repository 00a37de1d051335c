"""FP8 and int8 products on the GPU: the reference's rounding and numbers, a row's bits whatever stands by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import scaled_matrix
from kernels.gpu.round_rows import round_rows
from kernels.gpu.scaled_linear import FEW_ROWS, MANY_ROWS, scaled_linear
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
    weight = CASES[name].to(device)
    for rows in (3, FEW_ROWS + 2):
        x = (torch.randn(rows, weight.shape[1]) * torch.rand(rows, 1)).to(device)
        how = {"squares": weight.squares, "static": weight.static}
        got, expected = round_rows(x, weight.values.dtype, **how), scaled_matrix.round_rows(
            x, weight.values.dtype, **how
        )  # fmt: skip
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.float(), theirs.float())
        bias = torch.randn(weight.shape[0], device=device)
        assert error(multiply(x, weight, bias), scaled_matrix.scaled_linear(x, weight, bias)) < BOUND


def test_every_number_of_fp8_and_every_middle_rounds_to_even(device: torch.device) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[~numbers.isnan()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * (1 + 1e-6)])[None].to(device)
    got, _ = round_rows(x, FP8, static=torch.ones(1, device=device))
    assert torch.equal(got.float(), x.clamp(-448, 448).to(FP8).float())


@pytest.mark.parametrize("name", ["fp8", "fp8, squares", "int8"])
def test_a_row_has_the_same_bits_among_few_and_among_many(name: str, device: torch.device) -> None:
    weight = CASES[name].to(device)
    x = torch.randn(MANY_ROWS + 3, weight.shape[1]).to(device)
    few, many = multiply(x[:FEW_ROWS], weight), multiply(x, weight)
    assert torch.equal(multiply(x[:1], weight), few[:1])
    assert torch.equal(multiply(x[-FEW_ROWS - 1 :], weight), many[-FEW_ROWS - 1 :])


def test_a_scale_of_another_square_shows(device: torch.device) -> None:
    weight = CASES["fp8, squares"].to(device)
    x = torch.randn(3, weight.shape[1]).to(device)
    shifted = replace(weight, scales=weight.scales.roll(1, 1).contiguous())
    assert error(multiply(x, shifted), scaled_matrix.scaled_linear(x, weight)) > 1000 * BOUND


def test_rows_of_another_format_are_refused(device: torch.device) -> None:
    weight = CASES["int8"].to(device)
    x, scales = round_rows(torch.ones(1, 136, device=device), FP8)
    with pytest.raises(TypeError, match=r"rows of .*e4m3fn times a matrix of .*int8"):
        scaled_linear(x, scales, weight, out=torch.empty(1, 37, device=device))
