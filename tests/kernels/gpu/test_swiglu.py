"""The gated activation on the GPU."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.backends.torch.decoder import gated
from diptych.engine.models.shape import Activation
from kernels.gpu.swiglu import ACTIVATIONS, swiglu
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_reference(activation: Activation, device: torch.device) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(3, 2 * 77, device=device) * 3
    limit = 1.3 if activation == "clamped_swiglu" else None
    got = swiglu(gate_up, activation=activation, limit=limit)
    assert error(got, gated(activation, gate_up, limit)) < 1e-6
    if activation != "silu":
        assert error(swiglu(gate_up), gated(activation, gate_up, limit)) > 1e-2
