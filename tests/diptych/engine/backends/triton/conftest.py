"""The device of a step of the Triton backend."""

from __future__ import annotations

import pytest
import torch

from tests.triton_device import DEVICES, device_of


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the step; the CPU means Triton's interpreter."""
    return device_of(request.param)
