"""Stacks of experts' matrices: their numbers, and what is not stacked, in words."""

from __future__ import annotations

import pytest
import torch

from kernels import packed_matrix
from kernels.packed_stack import PackedStack, dequantise, lacks, stack
from kernels.scaled_matrix import FP8, INT8, quantise
from kernels.scaled_matrix import dequantise as numbers_of_scaled
from tests.kernels.test_packed_matrix import drawn


def test_a_stack_has_the_numbers_of_each_expert_in_order() -> None:
    experts = [
        [drawn(3, 96, 32)[0], drawn(4, 96, 32, zeros=False)[0]],
        [drawn(4, 96, 32)[0], drawn(3, 96, 32)[0]],
    ]
    found = stack(experts)
    assert found.shape == (2, 7, 96)
    for got, own in zip(dequantise(found), experts, strict=True):
        assert torch.equal(got, torch.cat([packed_matrix.dequantise(one) for one in own]))


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_scaled_matrices_keep_their_format_and_numbers(dtype: torch.dtype) -> None:
    experts = [[quantise(torch.randn(5, 160), dtype)] for _ in range(3)]
    found = stack(experts)
    assert found.matrix.code == ("fp8" if dtype == FP8 else "int8")
    expected = torch.stack([numbers_of_scaled(own[0]) for own in experts])
    assert torch.equal(dequantise(found), expected)
    assert found.nbytes < 2 * 3 * 5 * 160


def test_what_is_no_stack_is_named() -> None:
    ordered, other = (drawn(rows, 256, 128, ordered=True)[0] for rows in (3, 4))
    same = drawn(3, 256, 128)[0]
    assert lacks([[same], [torch.zeros(3, 256)]]) == "full numbers"
    assert lacks([[ordered], [other]]) == "inputs in an order of each matrix' own"
    assert lacks([[ordered], [ordered]]) is None
    assert lacks([[same], [drawn(3, 256, 64)[0]]]) == "matrices of several kinds"
    assert lacks([[same], [quantise(torch.randn(3, 256), FP8)]]) == "matrices of several kinds"
    with pytest.raises(ValueError, match="no stack of matrices of several kinds"):
        stack([[same], [drawn(3, 256, 64)[0]]])
    with pytest.raises(ValueError, match="3 rows are not those of 2 experts"):
        PackedStack(same, 2)
