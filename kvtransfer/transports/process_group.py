"""Process groups of two ranks: a torch.distributed group for one prefill and one decode process.

Made from the backends' own classes over a store of their own, since a process has one group for each of its
peers and torch's default group could be only one of them. All calls block, for a bounded time, and belong on
the group's own thread (`BlockingThread`); `abort` may come from any thread and is what unblocks them.

Gloo fails a transfer when its peer's socket closes, and after the timeout when its peer is frozen; what
failed once stays failed. NCCL is set up not to end the process by itself: torch's watchdog would take a
worker down, with all its requests, because one peer hangs. Its transfers are watched here instead, and the
communicator is aborted on a thread of its own, because the abort can hang as well (NVIDIA/nccl#829, #1013).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from diptych.engine.parallel.torch_groups import first_line, gloo_group
from kvtransfer.transports.base import TransportError, gpu_uuid

GLOO = "gloo"
NCCL = "nccl"
DECODE_RANK, PREFILL_RANK = 0, 1
BUILD_S = 20.0
"""Seconds that a process waits for the other one to join."""
TRANSFER_S = 10.0
"""Seconds that one message may take."""
SHARED_GPU_SINCE = (2, 30)
"""The first NCCL that lets two ranks share a GPU."""
_POLL_S = 0.0005


class ProcessGroup(Protocol):
    """End of a process group of two ranks."""

    def send(self, data: torch.Tensor) -> None:
        """Send contiguous bytes; returns when they may be overwritten. Raises TransportError."""
        ...

    def receive(self, data: torch.Tensor) -> None:
        """Fill `data` with the next message, which has this very size. Raises TransportError."""
        ...

    def abort(self) -> None:
        """End every transfer, now and from now on; never blocks."""
        ...


def listen_for_store(host: str) -> tuple[socket.socket, int]:
    """Return a listening socket at `host`, for the store of one group, and its port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(4)
    except BaseException:
        listener.close()
        raise
    return listener, int(listener.getsockname()[1])


def open_store(
    host: str, port: int, listener: socket.socket | None, timeout_s: float = BUILD_S
) -> c10d.Store:
    """Serve the group's store over `listener`, or join it where that is None. Raises TransportError."""
    try:
        store: c10d.Store = distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        return store
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"no store for the process group: {error}") from error


def build(name: str, store: c10d.Store, rank: int, host: str, device: torch.device) -> ProcessGroup:
    """Build the group with the other process, from `host`, this end's own address. Raises TransportError."""
    try:
        return _NcclGroup(store, rank, device) if name == NCCL else _GlooGroup(store, rank, host)
    except RuntimeError as error:
        raise TransportError(f"the {name} process group was not built: {first_line(error)}") from error


class _GlooGroup:
    def __init__(self, store: c10d.Store, rank: int, host: str) -> None:
        self._group = gloo_group(store, rank, 2, host, BUILD_S)
        self._peer = 1 - rank

    def send(self, data: torch.Tensor) -> None:
        _finish(lambda: self._group.send([data], self._peer, 0))

    def receive(self, data: torch.Tensor) -> None:
        _finish(lambda: self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        """Do nothing: the data socket is closed by then, and the other end gone or aborting too."""


def _finish(start: Callable[[], c10d.Work]) -> None:
    try:
        start().wait(timedelta(seconds=TRANSFER_S))
    except RuntimeError as error:
        raise TransportError(f"a transfer over Gloo failed: {first_line(error)}") from error


class _NcclGroup:
    """NCCL group, written against torch's documentation; README says where it was run."""

    def __init__(self, store: c10d.Store, rank: int, device: torch.device) -> None:
        # Read by the constructor. Errors are handled here: a watchdog that ends the process, or one that
        # ends it because the first one hangs, would make one peer's death that of every process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=BUILD_S)
        self._device, self._peer = device, 1 - rank
        self._aborted = threading.Event()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._group: Any = c10d.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, data: torch.Tensor) -> None:
        self._finish(lambda: self._group.send([data], self._peer, 0))

    def receive(self, data: torch.Tensor) -> None:
        self._finish(lambda: self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._group.abort, name="nccl-abort", daemon=True).start()

    def _finish(self, start: Callable[[], c10d.Work]) -> None:
        deadline = time.monotonic() + TRANSFER_S
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                work = start()
            while not work.is_completed():
                if self._aborted.is_set() or time.monotonic() > deadline:
                    self.abort()
                    raise TransportError("a transfer over NCCL was aborted or did not end in time")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            self.abort()
            raise TransportError(f"a transfer over NCCL failed: {first_line(error)}") from error


def nccl_unusable_reason(device: torch.device, other: str = "") -> str | None:
    """Return why NCCL cannot join `device` with the GPU of UUID `other`, None if it can."""
    if device.type != "cuda":
        return "its blocks must be on a GPU"
    if not distributed.is_nccl_available():
        return "this torch has no NCCL"
    version = torch.cuda.nccl.version()
    if other == gpu_uuid(device) and version < SHARED_GPU_SINCE:
        text = ".".join(map(str, version))
        return f"NCCL {text} does not let two ranks share a GPU (2.30 does): use cuda_ipc"
    return None
