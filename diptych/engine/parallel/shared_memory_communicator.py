"""The exchange of ranks on the CPUs of one host: slots of a file that all of them map.

    a rank    copies its tensor into its slot, then stores the number of the exchange in its counter
    all       wait, by futex, until every counter has come to that number, then read all slots

There are two sets of slots, which take turns. A rank writes the set of exchange n again in exchange n + 2,
after every counter has come to n + 1, and so after every rank has read that of n.

A store is seen after those before it on x86-64, where nothing else is needed. Elsewhere ranks use Gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from typing import Any

import numpy as np
import torch

from diptych.engine.parallel.communicator import GroupBroken

SLOT_BYTES = 4 << 20
"""Bytes of a rank in an exchange; more of them go in several."""
_LINE = 64
"""Bytes between two counters: ranks that spin on a line must not take it from each other."""
_SPINS = 100
"""Looks at a counter before a rank sleeps: some 20 microseconds, about what it takes to be woken."""
_SLEEP_S, _SLEEPS = 1, 300
"""Seconds of a sleep, and sleeps until a rank gives up. That another is dead is seen elsewhere, at once."""
_WORD = 1 << 32
"""Counters are words of 32 bits, as futexes are, and wrap after some days."""
_SYS_FUTEX, _WAIT, _WAKE = 202, 0, 1
"""Numbers of x86-64's system calls and of futex(2), between processes."""


def works_here() -> bool:
    """Return whether this machine orders stores as the exchange needs."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedMemoryCommunicator:
    """A rank's end of a group over one file."""

    on_device = False

    def __init__(self, fd: int, rank: int, ranks: int, slot_bytes: int = SLOT_BYTES) -> None:
        """Map the file that `exchange_file` made for as many ranks. Raises OSError, ValueError."""
        self.rank, self.ranks = rank, ranks
        pages = mmap.mmap(fd, _file_bytes(ranks, slot_bytes))
        self._counters = np.frombuffer(pages, np.uint32, ranks * _LINE // 4)[:: _LINE // 4]
        self._addresses = [self._counters[rank:].ctypes.data for rank in range(ranks)]
        slots = torch.frombuffer(pages, dtype=torch.uint8, offset=_slots_begin(ranks))
        self._slots = slots[: 2 * ranks * slot_bytes].view(2, ranks, slot_bytes)
        self._slot_bytes = slot_bytes
        self._exchanges = 0

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        everything = own.new_empty((self.ranks, *own.shape))
        self._exchange(own, everything)
        return everything

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """See `Communicator.gather`."""
        everything = own.new_empty((self.ranks, *own.shape)) if self.rank == 0 else None
        self._exchange(own, everything)
        return everything

    def _exchange(self, own: torch.Tensor, everything: torch.Tensor | None) -> None:
        ours = own.contiguous().view(-1).view(torch.uint8)
        theirs = None if everything is None else everything.view(self.ranks, -1).view(torch.uint8)
        for begin in range(0, ours.numel(), self._slot_bytes):
            end = min(begin + self._slot_bytes, ours.numel())
            slots = self._slots[self._exchanges % 2, :, : end - begin]
            slots[self.rank].copy_(ours[begin:end])
            self._exchanges += 1
            self._arrive()
            if theirs is not None:
                theirs[:, begin:end] = slots

    def _arrive(self) -> None:
        """Say that this rank has come to its exchange, and wait for all others. Raises GroupBroken."""
        self._counters[self.rank] = self._exchanges % _WORD
        _futex(self._addresses[self.rank], _WAKE, self.ranks, None)
        for rank in range(self.ranks):
            looks = 0
            while 0 < (self._exchanges - (seen := int(self._counters[rank]))) % _WORD < _WORD // 2:
                looks += 1
                if looks < _SPINS:
                    continue
                if looks > _SPINS + _SLEEPS:
                    raise GroupBroken(f"rank {rank} did not answer for {_SLEEPS * _SLEEP_S} s")
                _futex(self._addresses[rank], _WAIT, seen, _SLEEP)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLEEP = ctypes.byref(_TimeSpec(_SLEEP_S, 0))
_libc = ctypes.CDLL(None, use_errno=True)


def _futex(address: int, operation: int, value: int, timeout: Any) -> None:
    """Wait while the word at `address` is `value`, for `timeout` at most, or wake who waits (futex(2))."""
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), timeout, None, 0)


def exchange_file(ranks: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return a new file for the exchange of a group. Raises OSError."""
    fd = os.memfd_create("diptych-exchange", os.MFD_CLOEXEC)
    os.ftruncate(fd, _file_bytes(ranks, slot_bytes))
    return fd


def _slots_begin(ranks: int) -> int:
    return -(-ranks * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(ranks: int, slot_bytes: int) -> int:
    return _slots_begin(ranks) + 2 * ranks * slot_bytes
