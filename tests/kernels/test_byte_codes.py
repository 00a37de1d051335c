"""Bytes in codes of four bits: against the numbers of the file's blocks, and against bytes made of these."""

from __future__ import annotations

import pytest
import torch

from kernels.byte_codes import CodedBytes, as_bytes, code_matrix
from kernels.byte_linear import ByteMatrix, quantise_matrix, segments
from kernels.quantised_linear import BlockFormat, BlockMatrix, dequantise
from tests.kernels.cpu.tiny_models import random_blocks


def coded(matrix: BlockMatrix) -> CodedBytes:
    made = code_matrix(matrix)
    assert made is not None
    return made


@pytest.mark.parametrize("columns", [1, 31, 33, 100, 576, 577, 901, 1152])
@pytest.mark.parametrize("format", ["q4_0", "q4_1"])
def test_codes_are_the_bytes_of_the_numbers_but_for_rare_halves(format: BlockFormat, columns: int) -> None:
    blocks = random_blocks(40, columns, format)
    numbers = dequantise(blocks)
    written, plain = as_bytes(coded(blocks)), quantise_matrix(numbers)
    assert torch.equal(written.scales, plain.scales)
    apart = written.values.int() - plain.values.int()
    assert apart.abs().max() <= 1
    # A line is right to 1/32 of a step: so many are so near to a half.
    assert (apart != 0).float().mean() < 0.06
    steps = written.scales.repeat_interleave(segments(columns)[1], dim=1)[:, :columns]
    assert ((written.values * steps - numbers).abs() <= 0.54 * steps).all()


def test_a_segment_reaches_from_minus_127_to_127() -> None:
    # Of codes 0 .. 15, from the least up or from the greatest down.
    lines = torch.tensor([[1.0, -15.0], [14 / 15, 1.0], [-1.0, 15.0]]).half()
    codes = (torch.arange(16, dtype=torch.uint8) * 17).expand(3, 16)
    groups = torch.cat([lines.view(torch.uint8), codes], dim=1)
    values = as_bytes(coded(BlockMatrix("q4_1", 96, groups.view(1, -1)))).values
    first, second, third = values.view(3, 32)
    assert first.min() == -127
    assert second.max() == 127
    assert third.max() == 127
    assert values.min() > -128


def test_segments_of_zeros_and_of_no_numbers() -> None:
    blocks = random_blocks(4, 1024, "q4_1")
    parts = blocks.blocks.view(4, 32, 20)
    parts[0, :16] = 0
    parts[1, 3, :2] = torch.tensor([torch.inf]).half().view(torch.uint8)
    parts[2, 17, 2:4] = torch.tensor([torch.nan]).half().view(torch.uint8)
    made = coded(blocks)
    written = as_bytes(made)
    assert (written.values[0, :512] == 0).all()
    assert written.scales[0, 0] == 0
    assert not written.scales[1, 0].isfinite()
    assert written.scales[2, 1].isnan()
    assert (written.values.int().abs() <= 127).all()
    assert written.scales[3].isfinite().all()


def test_a_group_of_equal_values_is_coded_exactly() -> None:
    """Slopes of a scale that no code uses may be any, far beyond 16 bits."""
    blocks = random_blocks(1, 64, "q4_1")
    parts = blocks.blocks.view(1, 2, 20)
    parts[0, 0, :2] = torch.tensor([6000.0]).half().view(torch.uint8)
    parts[0, 0, 2:4] = torch.tensor([-18000.0]).half().view(torch.uint8)
    parts[0, 0, 4:] = 0x33  # all codes are 3, all numbers 0
    written = as_bytes(coded(blocks))
    assert (written.values[0, :32] == 0).all()
    assert written.values[0, 32:].abs().max() == 127


def test_q8_0_has_no_codes() -> None:
    assert code_matrix(random_blocks(3, 64, "q8_0")) is None


def test_coded_bytes_refuses_parts_that_do_not_fit() -> None:
    made = coded(random_blocks(3, 300, "q4_0"))
    with pytest.raises(ValueError, match="330 columns"):
        CodedBytes(330, made.codes, made.slopes, made.scales)
    with pytest.raises(ValueError, match="int16"):
        CodedBytes(300, made.codes, made.slopes.int(), made.scales)
    assert isinstance(as_bytes(made), ByteMatrix)
    assert made.shape == as_bytes(made).shape == (3, 300)
