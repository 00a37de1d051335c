"""Every kernel test runs in the interpreter on the CPU and, with the marker `gpu`, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED
from tests.kernels.gpu.interpreter import sum_all_rows_alike
from tests.triton_device import DEVICES, device_of

if INTERPRETED:
    sum_all_rows_alike()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the kernel."""
    return device_of(request.param)
