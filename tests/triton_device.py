"""Devices of tests of Triton kernels: the CPU by the interpreter, or a GPU with the marker `gpu`."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Parameters of a fixture."""


def device_of(name: str, *, interprets: bool = True) -> torch.device:
    """Return the device; skip the test where it has none.

    `interprets`: on the CPU the kernels run in Triton's interpreter; otherwise something else computes there.
    """
    from kernels.gpu.launch import INTERPRETED

    if name == "cpu" and interprets and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    if name == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    return torch.device(name)
