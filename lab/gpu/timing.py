"""Time of device work, by events: interleaved rounds over a cold L2, medians and their spread.

Candidates of one comparison run A B A B, so that a clock that drifts hurts all alike. Each is captured in a
CUDA graph where it can be: launch overhead of the interpreter is not what a section compares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lab.gpu.section import Context

Work = Callable[[], object]

_WARM_UPS = 3
_LEAST_FLUSH = 256 << 20
"""Bytes; several times the 60 MB that an H200's L2 holds."""


@dataclass(frozen=True)
class Timing:
    """Times of the rounds of one candidate, in seconds a call."""

    median_s: float
    spread: float
    """Distance of the quartiles over the median."""
    graph: bool
    """True if a captured graph was replayed."""

    def note(self) -> str:
        """Describe how far the rounds lay apart, for a figure."""
        return f"spread {100 * self.spread:.1f}%" + ("" if self.graph else ", eager")


def measure(
    context: Context, candidates: Mapping[str, Work], *, rounds: int = 20, calls: int = 1, graph: bool = True
) -> dict[str, Timing]:
    """Time every candidate in interleaved rounds; each does its work `calls` times (on inputs of its own, so
    that none finds another's in the cache).
    """
    if context.dry:
        return {name: _once(work) for name, work in candidates.items()}
    rounds = max(5, rounds // 4) if context.quick else rounds
    with torch.cuda.device(context.device):
        runs = {name: _prepared(work, graph) for name, work in candidates.items()}
        flush = torch.zeros(_flush_bytes(context.device) // 8, dtype=torch.int64, device=context.device)
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, (run, _) in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The host gets ahead while the flush runs, so no launch gap lies between the events. It only
                # reads: what it wrote would be on its way to memory while the candidate is timed.
                flush.max()
                begin.record()
                run()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize(context.device)
    return {
        name: _timing([begin.elapsed_time(end) * 1e-3 / calls for begin, end in marks[name]], captured)
        for name, (_, captured) in runs.items()
    }


def _once(work: Work) -> Timing:
    started = time.perf_counter()
    work()
    return Timing(time.perf_counter() - started, 0.0, False)


def _timing(seconds: list[float], captured: bool) -> Timing:
    quartiles = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return Timing(median, (quartiles[2] - quartiles[0]) / median, captured)


def _flush_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return max(_LEAST_FLUSH, 4 * int(getattr(properties, "L2_cache_size", 0)))


def _prepared(work: Work, graph: bool) -> tuple[Work, bool]:
    """`work` warmed up (compiled, its memory allocated), as a graph if that is wanted and it can be one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if not graph:
        return work, False
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            work()
    except RuntimeError:
        # Peers may synchronise with the host: they are timed as they are called.
        torch.cuda.synchronize()
        return work, False
    return captured.replay, True
