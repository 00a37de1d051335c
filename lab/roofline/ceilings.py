"""Ceilings of the machine, measured: bytes read a second, operations a second by number format.

A small native file (peak.cpp) reads memory with the widest loads, and multiplies in registers without
touching memory; torch's own matrix product is measured beside it, because an accelerator such as AMX is
reached only through a library here. The larger of the two is the peak, and which one it was is recorded.
Without a compiler the library alone is measured.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("peak.cpp")

Format = Literal["fp32", "bf16", "int8"]
FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")

_READ_BYTES = 512 << 20  # many times any last-level cache
_READS = 5
_ROUNDS = 4_000_000  # of the products in registers: about a tenth of a second
_TRIES = 3
_SIDES = (512, 1024, 2048)  # of the matrices given to the library


@dataclass(frozen=True)
class Peak:
    """Operations a second (a multiplication and an addition are two), and what reached them."""

    rate: float
    by: Literal["registers", "library"]


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of `threads` cores together."""

    threads: int
    read_rate: float
    """Bytes a second from memory."""
    peaks: dict[Format, Peak]

    def or_better(self, other: Ceilings) -> Ceilings:
        """Return the best of two measurements of the machine: a neighbour may have slowed either down."""
        peaks = {
            name: max(peak, other.peaks[name], key=lambda one: one.rate) for name, peak in self.peaks.items()
        }
        return Ceilings(self.threads, max(self.read_rate, other.read_rate), peaks)


def measure_ceilings(threads: int) -> Ceilings:
    """Takes about two seconds. The best of several tries: a ceiling is what was possible once."""
    with tempfile.TemporaryDirectory(prefix="diptych-peak-") as folder:
        library = _build(Path(folder))
        peaks = {name: _peak(library, name, threads) for name in FORMATS}
        return Ceilings(threads, _read_rate(library, threads), peaks)


def _build(folder: Path) -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _LOG.warning("no C++ compiler: peaks are those of torch's matrix products")
        return None
    target = folder / "peak.so"
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        _LOG.warning("%s failed, peaks are those of torch: %s", compiler, done.stderr.strip()[:300])
        return None
    library = ctypes.CDLL(str(target))
    for name in FORMATS:
        function = getattr(library, f"peak_{name}")
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64,)
    library.read_memory.restype = ctypes.c_int64
    library.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return library


def _read_rate(library: ctypes.CDLL | None, threads: int) -> float:
    memory = mmap.mmap(-1, _READ_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the weights have it: page tables must not be the limit
    buffer = torch.frombuffer(memory, dtype=torch.int64).fill_(1)
    if library is None:
        torch.set_num_threads(threads)
        return max(_READ_BYTES / _seconds(buffer.sum) for _ in range(_READS))
    share = _READ_BYTES // threads // 256 * 256

    def read(rank: int) -> None:
        library.read_memory(buffer.data_ptr() + rank * share, share)

    return max(share * threads / _together(threads, read) for _ in range(_READS))


def _peak(library: ctypes.CDLL | None, name: Format, threads: int) -> Peak:
    by_library = Peak(_product_rate(name, threads), "library")
    if library is None:
        return by_library
    function = getattr(library, f"peak_{name}")
    operations: int = function(_ROUNDS // 10)  # warms the core up
    if not operations:
        return by_library
    seconds = min(_together(threads, lambda _: function(_ROUNDS)) for _ in range(_TRIES))
    return max(by_library, Peak(threads * _ROUNDS * operations / seconds, "registers"), key=lambda p: p.rate)


def _product_rate(name: Format, threads: int) -> float:
    torch.set_num_threads(threads)
    return max(2 * side**3 / min(_product_times(name, side)) for side in _SIDES)


def _product_times(name: Format, side: int) -> list[float]:
    if name == "int8":
        whole = torch.randint(-99, 99, (side, side), dtype=torch.int8)
        return [_seconds(lambda: torch._int_mm(whole, whole)) for _ in range(1 + _TRIES)]
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    matrix = torch.randn(side, side).to(dtype)
    return [_seconds(lambda: matrix @ matrix) for _ in range(1 + _TRIES)]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _together(threads: int, work: Callable[[int], None]) -> float:
    """Seconds in which `threads` threads do `work(rank)`, all started at once. Its calls release the GIL."""
    ready = threading.Barrier(threads + 1)

    def run(rank: int) -> None:
        ready.wait()
        work(rank)

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started
