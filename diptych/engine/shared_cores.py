"""Cores that several worker processes of one machine lend each other.

A worker has home cores, enough for its work when every worker is busy. While it has work it claims them;
while it has none it yields them, and steps of the others are computed on them, too. A native step looks at
every piece of work which cores are idle (`diptych.engine.backend.CoreLendingBackend`), so that a core is lent
in the middle of a step and back with its owner after one such piece. Other backends look once, when a step
begins.

The state is a file in memory: a byte a core, a `DiptychCoreState` of kernels/cpu/abi.h, and another byte by
which its owner says that work is waiting, and for how long. In a rolling restart two processes write the same
bytes: a byte that one writes out of turn holds until the other's next step. A worker that is killed leaves
its bytes as they are; it is started again, and sets them right. Until then no worker borrows its cores, or
one keeps a core that it had borrowed until the owner has worked and yielded: that costs speed and nothing
else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Collection

from kernels.cpu.library import CORE_FREE, CORE_OWNED

NO_BACKLOG = 0
WAITED_UNIT_S = 1 / 32  # of the other values, which begin with 1 for no time at all
_MOST = 255


class SharedCores:
    """Access of one process to the shared states. Thread-safe: it reads and writes single bytes."""

    def __init__(self, fd: int, *, home: Collection[int], cores: int) -> None:
        """Map the file `fd`, open for writing and shared by all workers; cores are `0 .. cores - 1`.

        Raises ValueError for a home core that does not exist, or for none.
        """
        if not home or not all(0 <= core < cores for core in home):
            raise ValueError(f"home cores {sorted(home)} of {cores}")
        size = 2 * cores
        if os.fstat(fd).st_size < size:  # the first process; the file never shrinks here
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._bytes = (ctypes.c_uint8 * size).from_buffer(self._map)
        self._home = sorted(home)
        self._backlogs = range(cores, size)
        self._own_backlog = cores + self._home[0]
        self.others = [core for core in range(cores) if core not in self._home]
        for core in self._home:  # a predecessor that was killed may have left another state
            self._bytes[core] = CORE_FREE
        self.set_backlog(None)

    @property
    def address(self) -> int:
        """Address of the states of all cores, for native code; valid as long as this object lives."""
        return ctypes.addressof(self._bytes)

    @property
    def num_home(self) -> int:
        """Number of home cores."""
        return len(self._home)

    def claim(self) -> None:
        """Take the home cores back for work here. A borrower leaves after its present piece of work."""
        for core in self._home:
            self._bytes[core] = CORE_OWNED

    def yield_(self) -> None:
        """Offer the home cores to others, with no backlog. Cores that are borrowed stay so."""
        self.set_backlog(None)
        for core in self._home:
            if self._bytes[core] == CORE_OWNED:
                self._bytes[core] = CORE_FREE

    def num_idle(self) -> int:
        """Return how many cores of others are idle at this moment."""
        return sum(self._bytes[core] == CORE_FREE for core in self.others)

    def has_spare(self) -> bool:
        """Return whether a core of others is not claimed by its owner; it may be borrowed already."""
        return any(self._bytes[core] != CORE_OWNED for core in self.others)

    def set_backlog(self, waited_s: float | None) -> None:
        """Publish for how long work has waited here that a step does not take, up to 8 s; None: none waits.

        Other workers may then yield a core now and then.
        """
        units = 0 if waited_s is None else int(max(waited_s, 0.0) / WAITED_UNIT_S)
        self._bytes[self._own_backlog] = NO_BACKLOG if waited_s is None else min(1 + units, _MOST)

    def others_backlog_s(self) -> float | None:
        """Return the longest wait that another worker has published; None: no other worker has a backlog."""
        longest = max((self._bytes[at] for at in self._backlogs if at != self._own_backlog), default=0)
        return None if longest == NO_BACKLOG else (longest - 1) * WAITED_UNIT_S
