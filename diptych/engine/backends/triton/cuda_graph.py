"""Capture of work that is replayed: as a CUDA graph, or as plain calls where there is no CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class CaptureFailed(RuntimeError):
    """Work that was done and cannot be captured: it is computed without."""


class GraphCapture(Protocol):
    """A way to make work repeatable: it reads and writes the same memory each time."""

    def capture(self, work: Work) -> Work:
        """Return a function that does `work` again. `work` itself is done at least once before.

        Raises CaptureFailed when that is over, and what `work` raises.
        """
        ...


class EagerCapture:
    """Capture that does the work anew each time: the meaning of a replay."""

    def capture(self, work: Work) -> Work:
        """See `GraphCapture.capture`."""
        work()
        return work


class CudaGraphCapture:
    """Capture of work as a CUDA graph (CUDA C++ Programming Guide, CUDA graphs; torch.cuda.graph).

    All graphs share one pool of memory, since no two of them run at a time. The largest should be captured
    first: later ones then find what they need in the pool.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Capture on `stream`, whose priority the captured kernels keep, or on one of its own."""
        # One stream for warm-up and capture: library handles and workspaces belong to a stream, and one that
        # was first made during a capture would break it.
        self._stream = stream if stream is not None else torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Work:
        """See `GraphCapture.capture`; `work` may neither wait for the device nor copy from the host.

        Nothing is computed while it is captured: a rank whose capture fails leaves no other waiting.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and loaded at their first launch with arguments of a kind: neither is
            # allowed in a capture.
            work()
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        # A kernel or tensor that is collected within a capture would be freed in it, and end it.
        gc.disable()
        try:
            # Other threads may allocate meanwhile; only what this one does is held to the rules.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except Exception as error:
            raise CaptureFailed(str(error) or repr(error)) from error
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return graph.replay


def capture_for(device: torch.device) -> GraphCapture:
    """Return CUDA graphs on a CUDA device; elsewhere the work is done anew.

    They are captured on the current stream unless that is the default one: what is captured keeps the
    priority and the multiprocessors of its stream.
    """
    if device.type != "cuda":
        return EagerCapture()
    current = torch.cuda.current_stream(device)
    return CudaGraphCapture(device, None if current == torch.cuda.default_stream(device) else current)
