"""A child process that answers one question after another and may be lost over one: its frames and bounds.

A frame is a length (4 bytes, little-endian) and so many bytes. `gateway.answering_child` starts such
processes and replaces those that die.
"""

from __future__ import annotations

import resource
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

LENGTH: Final = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """Return a frame of `data`."""
    return LENGTH.pack(len(data)) + data


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the data of the next frame; None at the end."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def bound_process(memory_bytes: int) -> None:
    """Bound the address space of this process, which leaves no core file and lets `cpu_limit` end it."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the gateway's business


def bound_data(more_bytes: int) -> None:
    """Bound the private memory of this process to so much more than it has: beyond it is a MemoryError."""
    with open("/proc/self/statm") as counts:
        pages = int(counts.read().split()[5])
    most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process, with SIGPROF, after so much processor time inside."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
