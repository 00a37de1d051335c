"""Cores that several worker processes of one machine lend each other, step by step.

A worker has home cores, enough for its work when everybody is busy. While it has work it holds them; a
worker that starts a step also takes, for that step, whatever core nobody holds. So an idle core does not
stay idle, and a busy neighbour loses nothing: what is lent comes back when the borrower's step ends.

The cores are bytes of one file, held by POSIX record locks: the kernel drops them with the process, so a
killed worker keeps no core, and taking one costs a system call of about a microsecond.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Collection


class CoreShare:
    """One process's hand in the share. All calls come from one thread at a time."""

    def __init__(self, fd: int, *, home: Collection[int], cores: int) -> None:
        """`fd` is open for writing on the file that all workers share; cores are `0 .. cores - 1`.

        Raises ValueError for a home core that does not exist, or for none.
        """
        if not home or not all(0 <= core < cores for core in home):
            raise ValueError(f"home cores {sorted(home)} of {cores}")
        self._fd = fd
        self._home = frozenset(home)
        self._others = [core for core in range(cores) if core not in self._home]
        self._held: set[int] = set()

    def begin_step(self) -> int:
        """Hold the home cores, borrow what is free, and return how many threads the step may use.

        A home core that is lent out at this moment counts all the same: its borrower is gone within a step.
        """
        for core in self._home - self._held:
            self._try_hold(core)
        borrowed = sum(self._try_hold(core) for core in self._others)
        return len(self._home) + borrowed

    def end_step(self) -> None:
        """Give back what was borrowed; the home cores stay held, for there may be a next step."""
        for core in self._held - self._home:
            self._release(core)

    def rest(self) -> None:
        """No work is left: the home cores may be borrowed."""
        for core in tuple(self._held):
            self._release(core)

    def _try_hold(self, core: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, core)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        self._held.add(core)
        return True

    def _release(self, core: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, core)
        self._held.discard(core)
