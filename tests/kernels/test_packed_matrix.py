"""Packed matrices: the numbers are those of the codes they were packed from, in whatever layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.kquants import KQUANT_BYTES
from kernels.packed_matrix import Code, PackedMatrix, dequantise, from_blocks, join, pack, run_of
from kernels.quantised_linear import BLOCK_BYTES, E2M1, BlockFormat, BlockMatrix, block_of
from kernels.quantised_linear import dequantise as numbers_of_blocks
from tests.kernels.kquant_blocks import random_blocks

CASES = [
    # Rows, columns, columns of a group.
    (3, 64, 32),
    (5, 200, 64),
    (7, 96, 128),
    (2, 112, 16),
    (4, 100, 48),
]


def drawn(
    rows: int, columns: int, group: int, code: Code = "int4", *, zeros: bool = True, ordered: bool = False
) -> tuple[PackedMatrix, torch.Tensor]:
    """Return a packed matrix of random codes, and its numbers by their definition."""
    torch.manual_seed(rows + columns)
    groups, codes_of_all = -(-columns // group), 256 if code in ("int8", "fp8") else 16
    codes = torch.randint(0, codes_of_all, (rows, columns), dtype=torch.uint8)
    scales = (torch.rand(rows, groups) * 0.02 + 0.001).half()
    table = torch.randn(16) if code == "table4" else None
    zero_of = torch.randint(0, codes_of_all, (rows, groups)) if zeros else None
    of = (torch.arange(columns) // group)[torch.randperm(columns) if ordered else torch.arange(columns)]
    values = codes.float()
    if code == "fp8":
        codes &= 0x7E  # no NaN
        values = codes.view(torch.float8_e4m3fn).float()
    if code == "fp4":
        values = torch.tensor(E2M1)[codes.long()]
    if table is not None:
        values = table[codes.long()]
    offsets = (
        8.0 if zero_of is None and code == "int4" else 0.0 if zero_of is None else zero_of[:, of].float()
    )
    found = pack(
        code, codes, scales, group, table=table, zeros=zero_of, zero=8 if code == "int4" else 0,
        group_of=of if ordered else None,
    )  # fmt: skip
    assert found is not None
    return found, (values - offsets) * scales[:, of].float()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("code", "zeros", "ordered"),
    [
        ("int4", True, False),
        ("int4", False, False),
        ("int4", True, True),
        ("int8", True, False),
        ("table4", False, False),
        ("fp8", False, False),
        ("fp4", False, False),
    ],
)
def test_numbers_are_those_of_the_codes(
    case: tuple[int, int, int], code: Code, zeros: bool, ordered: bool
) -> None:
    found, numbers = drawn(*case, code, zeros=zeros, ordered=ordered)
    assert found.shape == tuple(numbers.shape)
    assert torch.equal(dequantise(found), numbers)
    chosen = torch.tensor([1, 0])
    assert torch.equal(dequantise(found.rows(chosen)), numbers[chosen])


@pytest.mark.parametrize("format", [*BLOCK_BYTES, *KQUANT_BYTES])
def test_blocks_of_files_keep_their_numbers_and_their_size(format: BlockFormat) -> None:
    size, nbytes = block_of(format)
    if format in KQUANT_BYTES:
        blocks = random_blocks(format, 6, 3).view(3, -1)
    else:
        blocks = torch.randint(0, 256, (3, 4, nbytes), dtype=torch.uint8)
        blocks[..., :4:2], blocks[..., 1:4:2] = 7, 30  # scales of a sensible size
        blocks = blocks.flatten(1)
    matrix = BlockMatrix(format, blocks.shape[1] // nbytes * size, blocks)
    found = from_blocks(matrix)
    assert found is not None
    assert torch.equal(dequantise(found), numbers_of_blocks(matrix))
    if format == "mxfp4":
        assert found.nbytes <= 1.06 * matrix.blocks.nbytes
    if format in ("q4_0", "q4_1", "q8_0", "q4_k", "iq4_xs", "iq4_nl"):
        assert found.nbytes <= 1.04 * matrix.blocks.nbytes + 64  # a table has 64 bytes


def test_runs_are_as_long_as_groups_and_the_padding_allow() -> None:
    """Of gpt-oss 2,880 columns are no whole tiles of 256."""
    expected = {
        (4096, 128): 128, (4096, 4096): 128, (4096, 64): 64, (4096, 96): 32, (4096, 16): 16, (2880, 2880): 64,
        (2880, 32): 32, (96, 96): 32, (64, 128): 32, (256, 256): 128,
    }  # fmt: skip
    assert {case: run_of(*case) for case in expected} == expected


@pytest.mark.parametrize("columns", [(0, 256), (256, 768), (128, 384), (160, 176), (16, 752), (512, 768)])
@pytest.mark.parametrize("format", [*BLOCK_BYTES, *KQUANT_BYTES])
def test_columns_are_cut_through_groups_with_the_same_numbers(
    format: BlockFormat, columns: tuple[int, int]
) -> None:
    """At multiples of 16, also through groups that share a scale of scales."""
    numbers, size = block_of(format)
    if format in KQUANT_BYTES:
        blocks = random_blocks(format, 5 * 768 // numbers, seed=2).view(5, -1)
    else:
        blocks = torch.randint(0, 60, (5, 768 // numbers * size), dtype=torch.uint8)
    whole = from_blocks(BlockMatrix(format, 768, blocks))
    assert whole is not None
    cut = whole.cut(slice(*columns))
    assert cut.shape == (5, columns[1] - columns[0])
    assert torch.equal(dequantise(cut), dequantise(whole)[:, columns[0] : columns[1]])
    if columns[0] % 256 == 0:  # a border of every format's groups
        assert cut.nbytes <= whole.nbytes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("code", ["int4", "table4", "fp8"])
def test_a_cut_within_a_group_keeps_its_scale_and_zero(case: tuple[int, int, int], code: Code) -> None:
    whole, numbers = drawn(*case, code, zeros=code == "int4")
    for begin in range(0, case[1] - 16, 16):
        assert torch.equal(dequantise(whole.cut(slice(begin, None))), numbers[:, begin:])
        assert torch.equal(dequantise(whole.cut(slice(0, begin + 16))), numbers[:, : begin + 16])


def test_columns_off_a_border_of_16_or_with_an_order_are_not_cut() -> None:
    with pytest.raises(ValueError, match="not whole runs of 16"):
        drawn(3, 128, 32)[0].cut(slice(24, 128))
    with pytest.raises(ValueError, match="an order of their own"):
        drawn(3, 128, 32, ordered=True)[0].cut(slice(32, 128))
    # The control: one group further the scales are others.
    whole, numbers = drawn(3, 128, 32)
    assert not torch.equal(dequantise(whole.cut(slice(32, 64))), numbers[:, 64:96])


def test_columns_that_are_no_whole_blocks_are_not_packed() -> None:
    assert from_blocks(BlockMatrix("q8_0", 40, torch.zeros(2, 68, dtype=torch.uint8))) is None


def test_groups_that_end_within_a_run_or_differ_in_size_are_not_packed() -> None:
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    assert pack("int4", codes, torch.ones(2, 12), 8) is None
    uneven = torch.arange(96) // 32 % 2
    assert pack("int4", codes, torch.ones(2, 3), 32, group_of=uneven) is None


def test_matrices_of_one_kind_are_joined_with_zeros_of_their_own() -> None:
    (first, a), (second, b) = drawn(3, 96, 32), drawn(4, 96, 32, zeros=False)
    joined = join([first, second])
    assert joined is not None
    assert torch.equal(dequantise(joined), torch.cat([a, b]))


@pytest.mark.parametrize(
    "other",
    [
        drawn(3, 96, 48)[0],
        drawn(3, 96, 32, "int8")[0],
        drawn(3, 96, 32, ordered=True)[0],
        replace(drawn(3, 96, 32)[0], scales=torch.ones(3, 3)),
    ],
)
def test_matrices_of_several_kinds_are_not_joined(other: PackedMatrix) -> None:
    assert join([drawn(3, 96, 32)[0], other]) is None
