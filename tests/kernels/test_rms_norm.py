"""RMS norm against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 5, 577)])
def test_rms_norm_equals_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 30, torch.randn(shape[-1])
    expected = functional.rms_norm(x, (shape[-1],), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_averages_bfloat16_in_float32() -> None:
    x = torch.full((1, 4096), 1e-3).bfloat16()
    got = rms_norm(x, torch.ones(4096).bfloat16(), 0.0)
    assert got.dtype == torch.bfloat16
    assert (got == 1).all()
