"""RMS norm on the GPU, alone and with the residual."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.rms_norm import rms_norm as meaning
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 5, 577), (4, 4096)])
def test_rms_norm_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 30).to(dtype)
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert error(got, meaning(x, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_grows_and_the_norm_is_of_what_is_stored(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(7, 577, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(577, device=device, dtype=dtype)
    summed, out = x + residual, torch.full_like(x, torch.nan)
    got = add_rms_norm(x, residual, weight, 1e-6, out=out)
    assert got is out
    assert error(residual, summed) < TOLERANCE[dtype]
    assert error(got, meaning(residual, weight, 1e-6)) < TOLERANCE[dtype]


def test_rms_norm_works_in_place_and_on_no_rows(device: torch.device) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    expected = meaning(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, out=x), expected)
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, 64)


def test_rows_may_lie_apart(device: torch.device) -> None:
    torch.manual_seed(3)
    whole = torch.randn(5, 100, device=device)
    expected, weight = whole.clone(), torch.rand(40, device=device)
    expected[:, 30:70] = meaning(whole[:, 30:70], weight, 1e-5)
    part = whole[:, 30:70]
    assert rms_norm(part, weight, 1e-5, out=part) is part
    torch.testing.assert_close(whole, expected)
    with pytest.raises(ValueError, match="not contiguous"):
        rms_norm(whole.t(), torch.ones(5, device=device), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weight_multiplies_before_the_result_is_rounded(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(4, 577, device=device).to(dtype), torch.rand(577, device=device) + 0.5
    assert error(rms_norm(x, weight, 1e-6), meaning(x, weight, 1e-6)) < TOLERANCE[dtype]
