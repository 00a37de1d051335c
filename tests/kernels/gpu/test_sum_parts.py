"""The sum of parts on the GPU: its bits are those of the parts added in their order."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.launch import INTERPRETED
from kernels.gpu.rms_norm import add_rms_norm
from kernels.gpu.sum_parts import sum_parts, sum_parts_rms_norm
from kernels.sum_parts import sum_parts as meaning
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 40), (6, 5, 577)])
def test_the_sum_has_the_bits_of_parts_added_in_order(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    parts = (torch.randn(shape, device=device) * 30).to(dtype)
    expected, got = meaning(parts), sum_parts(parts)
    sum_parts(parts, out=parts[0])
    assert torch.equal(parts[0], got)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts what it should round
        assert error(got, expected) < TOLERANCE[dtype]
    else:
        assert torch.equal(got, expected)


def test_another_order_gives_other_bits(device: torch.device) -> None:
    """The control of the bits."""
    torch.manual_seed(0)
    parts = torch.randn(6, 5, 577, device=device)
    assert not torch.equal(sum_parts(parts), sum_parts(parts.flip(0).contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_norm_in_one_launch_have_the_bits_of_two(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    parts = torch.randn(3, 7, 577, device=device).to(dtype)
    residual, weight = (torch.randn(size, device=device).to(dtype) for size in ((7, 577), (577,)))
    apart, together = residual.clone(), residual.clone()
    expected = add_rms_norm(sum_parts(parts), apart, weight, 1e-6)
    assert torch.equal(sum_parts_rms_norm(parts, together, weight, 1e-6), expected)
    assert torch.equal(together, apart)


def test_parts_that_lie_apart_and_none_at_all(device: torch.device) -> None:
    parts = torch.randn(2, 4, 8, device=device)
    assert sum_parts(parts[:, :0].contiguous()).shape == (0, 8)
    with pytest.raises(ValueError, match="not contiguous"):
        sum_parts(parts[:, :2])
