"""Choice of the device, and the memory that a KV pool may take there."""

from __future__ import annotations

from typing import NamedTuple

import torch

CONTEXT_BYTES = 600 << 20
"""Bytes that a process takes of a GPU before its first tensor: the CUDA context, kernels, library handles."""
FEW_BYTES = 256 << 20
"""Left free for small temporaries and the allocator's rounding."""
BYTES_A_GRAPH = 6 << 20
"""A recorded step: some four hundred kernel nodes and its share of the graphs' memory."""


class DeviceUnavailable(RuntimeError):
    """The device that was asked for is not there; the message says what is."""


def choose_device(asked: str) -> torch.device:
    """`auto` is the first GPU if there is one that torch can use, else the CPU; `cpu`, `cuda` and `cuda:n`
    are what they say. Raises DeviceUnavailable.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise DeviceUnavailable(f"device {asked}: torch {torch.__version__} {built}")
    device = torch.device("cuda:0" if asked in ("auto", "cuda") else asked)
    if (device.index or 0) >= torch.cuda.device_count():
        raise DeviceUnavailable(f"device {asked}: there are {torch.cuda.device_count()} CUDA devices")
    return device


class DeviceFault(RuntimeError):
    """Error that `break_device` raises where there is no GPU to lose."""


def break_device(device: torch.device) -> None:
    """Fault as a kernel does: launch one on `device` that asserts what is false, so that its context is lost.

    For tests, and for figures of a recovery. Raises DeviceFault on a CPU.
    """
    if device.type != "cuda":
        raise DeviceFault("a kernel's fault, on a CPU")
    torch._assert_async(torch.zeros(1, device=device))


def context_lost(error: Exception) -> bool:
    """Return whether this process has lost its GPU to a fault of a kernel, after a step raised `error`.

    No later call can succeed then.
    """
    if isinstance(error, DeviceFault):
        return True
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # of CUDA: an illegal address, a failed assertion of a kernel, a lost device
        return True
    return False


def pool_bytes(
    *,
    total: int,
    free: int,
    used: int,
    utilization: float,
    recordings: int,
    temporaries: int,
    ranks: int = 1,
) -> int:
    """Bytes that a KV pool may have: what `utilization` of a device's `total` leaves this process beside what
    it `used` already, but no more than is `free` now; less what decode steps' `recordings` will take, and
    `temporaries` of steps that are not recorded, in each of its `ranks` on the device.

    Not above 0 where nothing is left.
    """
    reserve = FEW_BYTES + BYTES_A_GRAPH * recordings + temporaries
    return min(int(utilization * total) - used, free) - ranks * reserve


class DeviceMemory(NamedTuple):
    """Memory of a CUDA device, in bytes."""

    total: int
    free: int
    used: int
    """Taken by this process."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device` as it is now, with what torch keeps but does not use given back first."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def free_pool_bytes(device: torch.device, utilization: float, recordings: int, temporaries: int) -> int:
    """`pool_bytes` of a CUDA device as it is now."""
    memory = device_memory(device)
    return pool_bytes(
        total=memory.total,
        free=memory.free,
        used=memory.used,
        utilization=utilization,
        recordings=recordings,
        temporaries=temporaries,
    )
