"""The gated activation, by its formula."""

from __future__ import annotations

import torch

from kernels.swiglu import swiglu


def test_swiglu_gates_by_the_first_half() -> None:
    gate, up = torch.tensor([[-2.0, 0.0, 3.0]]), torch.tensor([[5.0, 7.0, -1.0]])
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(swiglu(torch.cat([gate, up], -1)), expected)
