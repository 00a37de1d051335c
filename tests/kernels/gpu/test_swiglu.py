"""The gated activation on the GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.swiglu import swiglu
from kernels.swiglu import swiglu as meaning
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 577), (2, 2048), (0, 8)])
def test_swiglu_equals_the_reference(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(tokens, 2 * width, device=device) * 4).to(dtype)
    out = torch.full((tokens, width), torch.nan, dtype=dtype, device=device)
    got = swiglu(gate_up, out=out)
    assert got is out
    assert tokens == 0 or error(got, meaning(gate_up)) < TOLERANCE[dtype]
