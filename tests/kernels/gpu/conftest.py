"""Every kernel test runs in the interpreter on the CPU and, with the marker `gpu`, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED
from tests.kernels.gpu.interpreter import sum_all_rows_alike

if INTERPRETED:
    sum_all_rows_alike()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the kernel."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    return torch.device(request.param)
