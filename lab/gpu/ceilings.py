"""Ceilings of the machine itself: bytes a second of a device copy, bf16 operations of its matrix library."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.gpu.section import Context, Figure, device_of, figure
from lab.gpu.timing import measure

SECTION = "ceilings"
COPY = "copy bandwidth, bytes/s"
READ = "read bandwidth, bytes/s"
GEMM = "bf16 GEMM, FLOP/s"
_COPY_BYTES = 4 << 30
_GEMM_SIDE = 8192


def ceilings(context: Context) -> Iterator[Figure]:
    """Copy bandwidth (bytes read plus bytes written), read bandwidth and the bf16 GEMM rate on random data.

    Other sections find them in `context.measured` under COPY, READ and GEMM.
    """
    device = device_of(context)
    yield from _memory(context, device)
    yield _gemm(context, device)


def _memory(context: Context, device: torch.device) -> Iterator[Figure]:
    context.say("device copy")
    size = context.pick(_COPY_BYTES, _COPY_BYTES // 4, 1 << 16)
    # Random bytes: zeros may move faster than real data would.
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    words = source.view(torch.int64)
    # Called, not replayed: in a graph the copy is left to the copy engine, which is a third slower.
    times = measure(context, {"copy": lambda: target.copy_(source), "read": lambda: words.max()}, graph=False)
    copied, read = times["copy"], times["read"]
    context.measured[COPY] = 2 * size / copied.median_s
    context.measured[READ] = size / read.median_s
    yield figure(SECTION, "device copy", 2 * size / copied.median_s / 1e12, "TB/s", note=copied.note())
    yield figure(SECTION, "device read", size / read.median_s / 1e12, "TB/s", note=read.note())


def _gemm(context: Context, device: torch.device) -> Figure:
    context.say("bf16 matrix product")
    side = context.pick(_GEMM_SIDE, _GEMM_SIDE, 64)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    time = measure(context, {"gemm": lambda: torch.mm(left, right, out=out)})["gemm"]
    context.measured[GEMM] = 2 * side**3 / time.median_s
    return figure(
        SECTION, f"bf16 GEMM {side}³", 2 * side**3 / time.median_s / 1e12, "TFLOP/s", note=time.note()
    )
