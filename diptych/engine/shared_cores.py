"""Cores that several worker processes of one machine lend each other.

A worker has home cores, enough for its work when everybody is busy. While it has work it owns them; while it
has none, steps of the others are computed on them, too: an idle core does not stay idle. Natively a step
looks at every piece of work which cores are free (`diptych.engine.backend.CoreLendingBackend`), so that a core is lent in the
middle of a step and back with its owner after one such piece. Backends that cannot do that look once, when a
step begins.

The share is a file in memory: a byte a core, a `DiptychCoreState` of kernels/cpu/abi.h, and another one
by which its owner says that work is waiting, and for how long. In a rolling restart two processes write the
same bytes: what one says out of turn holds until the other's next step. A worker that is killed leaves its
bytes as they are; it is started again, and sets them right. Until then nobody borrows its cores, or one that
it had borrowed until the owner has worked and rested: that costs speed and nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Collection

from kernels.cpu.library import CORE_FREE, CORE_OWNED

NOTHING_WAITS = 0
WAITED_UNIT_S = 1 / 32  # of the other values, which begin with 1 for no time at all
_MOST = 255


class SharedCores:
    """One process's hand in the share. Any thread may call: all is single bytes."""

    def __init__(self, fd: int, *, home: Collection[int], cores: int) -> None:
        """`fd` is open for writing on the file that all workers share; cores are `0 .. cores - 1`.

        Raises ValueError for a home core that does not exist, or for none.
        """
        if not home or not all(0 <= core < cores for core in home):
            raise ValueError(f"home cores {sorted(home)} of {cores}")
        size = 2 * cores
        if os.fstat(fd).st_size < size:  # whoever comes first; a file never shrinks here
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._bytes = (ctypes.c_uint8 * size).from_buffer(self._map)
        self._home = sorted(home)
        self._waiting = range(cores, size)
        self._says = cores + self._home[0]
        self.others = [core for core in range(cores) if core not in self._home]
        for core in self._home:  # whatever a predecessor that was killed left there
            self._bytes[core] = CORE_FREE
        self.set_backlog(None)

    @property
    def address(self) -> int:
        """Of the states of all cores, for native code. They stay there as long as this object does."""
        return ctypes.addressof(self._bytes)

    @property
    def home(self) -> int:
        """How many cores are this worker's own."""
        return len(self._home)

    def own(self) -> None:
        """There is work: the home cores are needed here. Who has borrowed one is on its way out."""
        for core in self._home:
            self._bytes[core] = CORE_OWNED

    def rest(self) -> None:
        """No work is left, or none for now, and none waits: the home cores may be borrowed. Those that are
        stay so.
        """
        self.set_backlog(None)
        for core in self._home:
            if self._bytes[core] == CORE_OWNED:
                self._bytes[core] = CORE_FREE

    def free(self) -> int:
        """How many cores of others are free at this moment."""
        return sum(self._bytes[core] == CORE_FREE for core in self.others)

    def spare(self) -> bool:
        """Whether a core of others is not at work for its owner; it may be borrowed already."""
        return any(self._bytes[core] != CORE_OWNED for core in self.others)

    def set_backlog(self, waited_s: float | None) -> None:
        """Say for how long work has waited here that a step does not take, up to 8 s; None: there is none.
        Others may let go of a core now and then.
        """
        units = 0 if waited_s is None else int(max(waited_s, 0.0) / WAITED_UNIT_S)
        self._bytes[self._says] = NOTHING_WAITS if waited_s is None else min(1 + units, _MOST)

    def others_waited_s(self) -> float | None:
        """For how long work of another worker has waited for cores; None: none does."""
        longest = max((self._bytes[place] for place in self._waiting if place != self._says), default=0)
        return None if longest == NOTHING_WAITS else (longest - 1) * WAITED_UNIT_S
