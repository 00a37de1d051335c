"""Helpers of all launchers: number formats for Triton, sizes that are powers of two, the device's width."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter; read once, as Triton does when it decorates a kernel."""

LOG2_E = 1.4426950408889634
"""exp(x) = 2 ** (x * LOG2_E): the hardware has powers of two."""

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_H200_MULTIPROCESSORS = 132


def operand_type(dtype: torch.dtype) -> Any:
    """Return the Triton type in which matrices of `dtype` are multiplied (sums are float32 always).

    The interpreter has no bfloat16 arithmetic, and takes float32. Raises TypeError for other formats.
    """
    if dtype not in _TYPES:
        raise TypeError(f"no kernel computes in {dtype}")
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TYPES[dtype]


def power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run side by side at least; on the CPU, what an H200 has."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor [...]` if its numbers lie one after the other. Raises ValueError, with `name`,
    otherwise.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {tuple(tensor.shape)} is not contiguous")
    return tensor
