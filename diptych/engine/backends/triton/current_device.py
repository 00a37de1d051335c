"""The device on which a backend makes tensors and launches kernels: the calling thread's current one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def numbered(device: torch.device | str) -> torch.device:
    """Return `device` with its number: that of the current GPU where none was given."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the calling thread's current one: tensors are made and kernels launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
