"""Products with packed matrices on the GPU: the reference's numbers, and a row's bits whatever stands by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.packed_linear import FEW_ROWS, MANY_ROWS, packed_linear, unpack
from kernels.packed_matrix import PackedMatrix, dequantise, from_blocks
from kernels.packed_matrix import packed_linear as meaning
from kernels.quantised_linear import BlockMatrix
from tests.kernels.gpu.paged import error
from tests.kernels.kquant_blocks import random_blocks
from tests.kernels.test_packed_matrix import drawn

CASES: dict[str, PackedMatrix] = {
    "int4, groups of 32": drawn(40, 96, 32)[0],
    "int4, groups of 64, one zero": drawn(33, 200, 64, zeros=False)[0],
    "int4, groups of 128, reordered": drawn(17, 256, 128, ordered=True)[0],
    "int4, groups of 128, runs of 128": drawn(70, 512, 128)[0],
    "int4, an odd last tile": drawn(21, 384, 128, zeros=False)[0],
    "int4, one group": drawn(5, 70, 70)[0],
    "int8": drawn(35, 160, 32, "int8")[0],
    "table": drawn(9, 128, 64, "table4", zeros=False)[0],
    "table, runs of 64": drawn(9, 320, 64, "table4", zeros=False)[0],
    "fp8": drawn(9, 128, 128, "fp8", zeros=False)[0],
    "fp8, one group, runs of 128": drawn(9, 512, 512, "fp8", zeros=False)[0],
    "fp4": drawn(37, 160, 32, "fp4", zeros=False)[0],
}
for _name in ("q4_k", "q6_k"):
    _blocks = BlockMatrix(_name, 256, random_blocks(_name, 9, 4).view(9, -1))  # type: ignore[arg-type]
    _found = from_blocks(_blocks)
    assert _found is not None
    CASES[_name] = _found
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3}
"""Relative to the norm: the order of sums, and one rounding of the result."""


def inputs(matrix: PackedMatrix, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    torch.manual_seed(rows)
    memory = torch.full((rows + 8, matrix.columns), torch.nan, dtype=dtype, device=device)
    memory[:rows] = torch.randn(rows, matrix.columns).to(device, dtype)
    return memory[:rows]


@pytest.mark.parametrize("name", CASES)
def test_products_and_numbers_equal_the_reference(name: str, device: torch.device) -> None:
    matrix = CASES[name].to(device)
    bias = torch.randn(matrix.shape[0], device=device)
    for rows, dtype in ((3, torch.float32), (FEW_ROWS + 2, torch.float16)):
        x = inputs(matrix, rows, dtype, device)
        got = packed_linear(x, matrix, bias.to(dtype))
        assert error(got, meaning(x, matrix, bias.to(dtype))) < BOUND[dtype]
    numbers = unpack(matrix, torch.empty(matrix.shape, dtype=torch.float16, device=device))
    assert torch.equal(numbers, dequantise(matrix).half())


def test_a_row_has_the_same_bits_among_few_and_among_many(device: torch.device) -> None:
    matrix = CASES["int4, groups of 128, reordered"].to(device)
    x = inputs(matrix, MANY_ROWS + 3, torch.float16, device)
    few = packed_linear(x[:FEW_ROWS], matrix)
    for rows in (1, 7):
        assert torch.equal(packed_linear(x[:rows], matrix), few[:rows])
    many = packed_linear(x, matrix)
    assert torch.equal(packed_linear(x[: FEW_ROWS + 1], matrix), many[: FEW_ROWS + 1])
    assert torch.equal(packed_linear(x[-FEW_ROWS - 1 :], matrix), many[-FEW_ROWS - 1 :])


def test_outputs_may_be_columns_of_a_wider_tensor(device: torch.device) -> None:
    matrix = CASES["int8"].to(device)
    x = inputs(matrix, 3, torch.float16, device)
    wide = torch.zeros(3, 50, dtype=torch.float16, device=device)
    packed_linear(x, matrix, out=wide[:, 10:45])
    assert torch.equal(wide[:, 10:45], packed_linear(x, matrix))
    assert not bool(wide[:, :10].any() or wide[:, 45:].any())


def test_a_scale_or_a_half_byte_in_another_place_shows(device: torch.device) -> None:
    """The bound would not hide a layout read wrongly."""
    matrix = CASES["int4, groups of 32"].to(device)
    x = inputs(matrix, 3, torch.float16, device)
    expected = meaning(x, matrix)
    shifted = replace(matrix, scales=matrix.scales.roll(1, 0).contiguous())
    swapped = replace(matrix, codes=matrix.codes >> 4 | matrix.codes << 4)
    for wrong in (shifted, swapped):
        assert error(packed_linear(x, wrong), expected) > 100 * BOUND[torch.float16]


def test_rows_of_another_width_are_refused(device: torch.device) -> None:
    matrix = CASES["int8"].to(device)
    with pytest.raises(ValueError, match="rows of 64 numbers times weights of 160"):
        packed_linear(torch.zeros(1, 64, device=device), matrix)
