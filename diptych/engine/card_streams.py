"""Streams of two phases that one process computes on one GPU: of unequal priority, or each with its own part.

Green contexts (CUDA driver API, "Green Contexts") give a stream multiprocessors of its own. They are split
once, so that the parts do not overlap, and last as long as the process: torch keeps events and memory of
their streams. A graph that is captured on such a stream replays on its multiprocessors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

HIGH, LOW = -1, 0
"""Priorities of CUDA streams: the lower number runs first."""
_RESOURCE_BYTES = 512  # more than a CUdevResource of any version
_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, CU_GREEN_CTX_DEFAULT_STREAM
_STEP = 8
"""Multiprocessors are given in such groups (compute capability 9.0 and later)."""


class NoPartition(RuntimeError):
    """Multiprocessors that cannot be split, by this driver or on this card."""


@dataclass(frozen=True)
class CardStreams:
    """Streams of the two phases of one device."""

    decode: torch.cuda.Stream
    prefill: torch.cuda.Stream
    multiprocessors: tuple[int, int] | None = None
    """Multiprocessors of each, in this order; None where both have all."""


def priority_streams(device: torch.device) -> CardStreams:
    """Return streams over the whole card, of which that of decode steps runs first."""
    return CardStreams(torch.cuda.Stream(device, priority=HIGH), torch.cuda.Stream(device, priority=LOW))


def default_part(multiprocessors: int) -> int:
    """Return the multiprocessors of decode steps where none are chosen: a quarter, in whole groups.

    Decode steps read memory, which a quarter nearly saturates (docs/performance.md, "GPU").
    """
    return max(multiprocessors // 4 // _STEP, 1) * _STEP


def partition_streams(device: torch.device, decode: int = 0) -> CardStreams:
    """Split the multiprocessors: at least `decode` of them (0: `default_part`) for decode steps, the rest.

    Raises NoPartition.
    """
    total = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = decode or default_part(total)
    if not 0 < wanted < total:
        raise NoPartition(f"{wanted} multiprocessors for decode steps, and {device} has {total}")
    driver = ctypes.CDLL("libcuda.so.1")
    ordinal = ctypes.c_int(device.index or 0)
    opaque = ctypes.c_byte * _RESOURCE_BYTES
    whole, part, rest = opaque(), opaque(), opaque()
    torch.cuda.synchronize(device)  # the primary context is there
    _call(driver, "cuDeviceGetDevResource", ordinal, ctypes.byref(whole), ctypes.c_int(_SM_RESOURCE))
    groups = ctypes.c_uint(1)
    _call(
        driver,
        "cuDevSmResourceSplitByCount",
        ctypes.byref(part),
        ctypes.byref(groups),
        ctypes.byref(whole),
        ctypes.byref(rest),
        ctypes.c_uint(0),
        ctypes.c_uint(wanted),
    )
    given = -(-wanted // _STEP) * _STEP
    streams = [_green_stream(driver, device, one, priority) for one, priority in ((part, HIGH), (rest, LOW))]
    return CardStreams(streams[0], streams[1], (given, total - given))


def _green_stream(
    driver: ctypes.CDLL, device: torch.device, resource: ctypes.Array[ctypes.c_byte], priority: int
) -> torch.cuda.Stream:
    """Return a stream on these multiprocessors. Raises NoPartition."""
    description, green, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    flags = ctypes.c_uint(_NON_BLOCKING)
    _call(
        driver,
        "cuDevResourceGenerateDesc",
        ctypes.byref(description),
        ctypes.byref(resource),
        ctypes.c_uint(1),
    )
    ordinal = ctypes.c_int(device.index or 0)
    _call(driver, "cuGreenCtxCreate", ctypes.byref(green), description, ordinal, flags)
    _call(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), green, flags, ctypes.c_int(priority))
    return torch.cuda.ExternalStream(stream.value or 0, device=device)


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call the driver. Raises NoPartition."""
    function = getattr(driver, name, None)
    if function is None:
        raise NoPartition(f"the CUDA driver has no {name}: it needs to be of CUDA 12.4 or later")
    if status := function(*arguments):
        raise NoPartition(f"{name} gave {status}")
