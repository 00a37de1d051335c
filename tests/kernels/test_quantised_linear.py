"""Quantised matrices and rows against gguf-py, and against what rounding allows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

from kernels.quantised_linear import (
    BLOCK_BYTES,
    BlockFormat,
    BlockMatrix,
    GroupFormat,
    dequantise,
    quantise_matrix,
    quantise_rows,
    quantised_linear,
)

KINDS: dict[BlockFormat, gguf.GGMLQuantizationType] = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("format", KINDS)
def test_blocks_stand_for_the_numbers_that_gguf_says(format: BlockFormat) -> None:
    numbers = (random(7, 96) * torch.logspace(-6, 2, 7).unsqueeze(1)).numpy()
    packed = gguf.quants.quantize(numbers, KINDS[format])
    meant = gguf.quants.dequantize(packed, KINDS[format])
    matrix = BlockMatrix(format, 96, torch.from_numpy(np.array(packed)))
    assert torch.equal(dequantise(matrix), torch.from_numpy(np.array(meant)))
    assert matrix.shape == (7, 96)


@pytest.mark.parametrize(
    ("format", "kind"),
    [("iq4_nl", gguf.GGMLQuantizationType.IQ4_NL), ("mxfp4", gguf.GGMLQuantizationType.MXFP4)],
)
def test_codes_in_tables_stand_for_the_numbers_that_gguf_says(
    format: GroupFormat, kind: gguf.GGMLQuantizationType
) -> None:
    blocks = torch.arange(256).repeat(64)[: 9 * 3 * BLOCK_BYTES[format]].to(torch.uint8).view(9, -1)
    if format == "iq4_nl":
        blocks.view(9, 3, -1)[..., :2] = random(9, 3, 1).half().view(torch.uint8)
    else:
        blocks.view(9, 3, -1)[..., 0] = torch.tensor([0, 1, 250])  # subnormal scales, and a large one
    meant = gguf.quants.dequantize(blocks.numpy(), kind)
    assert torch.equal(dequantise(BlockMatrix(format, 96, blocks)), torch.from_numpy(np.array(meant)))


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_a_quantised_matrix_is_within_half_a_step(columns: int) -> None:
    numbers = random(5, columns)
    numbers[2] = 0.0
    matrix = quantise_matrix(numbers)
    back = dequantise(matrix)
    groups = functional.pad(numbers, (0, -columns % 32)).view(5, -1, 32)
    steps = groups.abs().amax(dim=-1) / 127
    allowed = steps.repeat_interleave(32, dim=1)[:, :columns] * 0.57  # half, and the rounding of the scale
    assert ((back - numbers).abs() <= allowed).all()
    assert (back[2] == 0).all()


def test_what_gguf_quantises_comes_back_as_near() -> None:
    numbers = random(9, 64)
    theirs = torch.from_numpy(np.array(gguf.quants.quantize(numbers.numpy(), KINDS["q8_0"])))
    error = (dequantise(BlockMatrix("q8_0", 64, theirs)) - numbers).square().mean()
    assert (dequantise(quantise_matrix(numbers)) - numbers).square().mean() <= error


def test_an_outlier_costs_no_other_group_and_gets_sixteen_bits() -> None:
    x = random(3, 96)
    x[1, 40] = 1000.0
    values, scales = quantise_rows(x)
    error = ((values.float() * scales).reshape(3, 96) - x).abs()
    assert values[1, 1].abs().max() == 127 * 256
    assert values[1, 0].abs().max() == values[1, 2].abs().max() == 127
    assert error[1, 32:64].max() <= 1000 / 127 / 256 * 0.51
    assert error.max() < 0.03


def test_groups_of_like_peaks_have_eight_bits() -> None:
    x = random(5, 320).clamp(-2.0, 2.0)
    x[:, ::16] = 2.0
    values, _ = quantise_rows(x)
    assert (values.abs().amax(dim=-1) == 127).all()


def test_rows_that_are_not_finite_or_vanish() -> None:
    x = random(4, 40)
    x[0, 3] = torch.inf
    x[1, 39] = torch.nan
    x[2] = 1e-38
    weight = random(6, 40, seed=2)
    y = quantised_linear(x, weight)
    assert y[:2].isnan().all()
    assert (y[2].abs() < 1e-30).all()
    assert (y[3] - functional.linear(x[3], weight)).abs().max() < 0.3


def test_a_linear_layer_is_near_to_the_exact_one() -> None:
    x, weight, bias = random(8, 100), random(50, 100, seed=3), random(50, seed=4)
    exact = functional.linear(x, weight, bias)
    error = (quantised_linear(x, weight, bias) - exact).norm() / exact.norm()
    assert 0 < error < 0.01


def test_bytes_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="q4_1"):
        BlockMatrix("q4_1", 64, torch.zeros((2, 36), dtype=torch.uint8))
