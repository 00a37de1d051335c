"""Cores that several worker processes of one machine lend each other.

A worker has home cores, enough for its work when every worker is busy. While it has work it claims them;
while it has none it yields them, and steps of the others are computed on them, too. A native step looks at
every piece of work which cores are idle (`diptych.engine.backend.CoreLendingBackend`), so that a core is lent
in the middle of a step and back with its owner after one such piece. Other backends look once, when a step
begins.

The state is a file in memory: a byte a core, a `DiptychCoreState` of kernels/cpu/abi.h; behind them lie the
bytes of `SharedBacklog`. In a rolling restart two processes write the same
bytes: a byte that one writes out of turn holds until the other's next step. A worker that is killed leaves
its bytes as they are; it is started again, and sets them right. Until then no worker borrows its cores, or
one keeps a core that it had borrowed until the owner has worked and yielded: that costs speed and nothing
else.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection

from diptych.engine.shared_backlog import SharedBacklog
from kernels.cpu.library import CORE_FREE, CORE_OWNED


class SharedCores:
    """Access of one process to the shared states. Thread-safe: it reads and writes single bytes."""

    def __init__(self, fd: int, *, home: Collection[int], cores: int) -> None:
        """Map the file `fd`, open for writing and shared by all workers; cores are `0 .. cores - 1`.

        Raises ValueError for a home core that does not exist, or for none.
        """
        if not home or not all(0 <= core < cores for core in home):
            raise ValueError(f"home cores {sorted(home)} of {cores}")
        self._home = sorted(home)
        self.backlog = SharedBacklog(fd, own=self._home[0], cores=cores)
        self._map = mmap.mmap(fd, cores)
        self._bytes = (ctypes.c_uint8 * cores).from_buffer(self._map)
        self.others = [core for core in range(cores) if core not in self._home]
        for core in self._home:  # a predecessor that was killed may have left another state
            self._bytes[core] = CORE_FREE

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
        """Offer the home cores to others. Cores that are borrowed stay so."""
        for core in self._home:
            if self._bytes[core] == CORE_OWNED:
                self._bytes[core] = CORE_FREE

    def num_idle(self) -> int:
        """Return how many cores of others are idle at this moment."""
        return sum(self._bytes[core] == CORE_FREE for core in self.others)

    def has_spare(self) -> bool:
        """Return whether a core of others is not claimed by its owner; it may be borrowed already."""
        return any(self._bytes[core] != CORE_OWNED for core in self.others)
