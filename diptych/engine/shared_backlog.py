"""Time that work has waited in each of several worker processes that compute on one device.

A file in memory has a byte for each worker: the CPU's workers have theirs behind the states of the cores
(`diptych.engine.shared_cores`), those of the first GPU behind them, and so on. The workers of other devices
read none of them: a prompt gains nothing from a pause on another card.

A worker that is killed leaves its byte as it is, and others go on making room for its work until it has been
started again.
"""

from __future__ import annotations

import mmap
import os

NO_BACKLOG = 0
WAITED_UNIT_S = 1 / 32  # of the other values, which begin with 1 for no time at all
_MOST = 255


class SharedBacklog:
    """Access of one process to the waiting times. Thread-safe: it reads and writes single bytes."""

    def __init__(self, fd: int, *, own: int, cores: int, gpu: int | None = None) -> None:
        """Map the file `fd`, open for writing and shared by the workers of a machine of `cores`.

        Args:
            fd: file; it grows as it must.
            own: number of this worker on the machine, below `cores`: that of its first home core.
            cores: cores of the machine.
            gpu: number of the GPU that this worker computes on; None: the CPU.
        """
        first = cores * (1 if gpu is None else 2 + gpu)
        self._backlogs = range(first, first + cores)
        self._own = first + own
        if os.fstat(fd).st_size < self._backlogs.stop:  # the first process; the file never shrinks here
            os.ftruncate(fd, self._backlogs.stop)
        self._bytes = mmap.mmap(fd, self._backlogs.stop)
        self.set(None)

    def set(self, waited_s: float | None) -> None:
        """Publish for how long work has waited here that a step does not take, up to 8 s; None: none waits.

        Other workers may then leave the device to it now and then.
        """
        units = 0 if waited_s is None else int(max(waited_s, 0.0) / WAITED_UNIT_S)
        self._bytes[self._own] = NO_BACKLOG if waited_s is None else min(1 + units, _MOST)

    def of_others_s(self) -> float | None:
        """Return the longest wait that another worker has published; None: no other worker has a backlog."""
        longest = max((self._bytes[at] for at in self._backlogs if at != self._own), default=0)
        return None if longest == NO_BACKLOG else (longest - 1) * WAITED_UNIT_S
