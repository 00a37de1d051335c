"""Forecast of the device that a worker will choose, without an import of torch."""

from __future__ import annotations

from pathlib import Path

_NVIDIA = Path("/dev/nvidiactl")


def expects_gpu(device: str) -> bool:
    """Return whether a worker with `--device DEVICE` will compute on a GPU, as far as can be seen before."""
    return device.startswith("cuda") or (device == "auto" and _NVIDIA.exists())
