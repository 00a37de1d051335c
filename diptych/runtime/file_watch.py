"""Files that operators replace while a process runs: keys, certificates."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 60.0

_Signature = tuple[int, int, int, int, int]


def readable_by_all(path: Path) -> bool:
    """Return whether any user of this machine may read the file. Raises OSError when it is not there."""
    return bool(os.stat(path).st_mode & stat.S_IROTH)


class FileWatch:
    """Tells when one of some files has become another one: by its times, size, inode or permissions.

    The files are looked at once in ``every_s`` seconds, however often one asks. Any thread may ask. Who finds
    that a change cannot be used says so with `failed`, and is told of it again until it can.
    """

    def __init__(
        self, *paths: Path, every_s: float = LOOK_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._every_s = every_s
        self._clock = clock
        self._seen = self._look()
        self._next = clock() + every_s
        self._unused = False  # what was seen last
        self._said: tuple[str, float] | None = None

    def changed(self) -> bool:
        """Return True once after each change, and at each look after `failed`.

        A file that is gone is a change.
        """
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._every_s
        if not self._unused:
            self._said = None  # what is wrong next is news
        found = self._look()
        changed = self._unused or found != self._seen
        self._seen, self._unused = found, False
        return changed

    def failed(self, why: str) -> bool:
        """Note that the file of now cannot be used.

        Returns whether to log it: it is news, or a minute old.
        """
        self._unused = True
        now = self._clock()
        if self._said is not None and self._said[0] == why and now < self._said[1] + SAY_EVERY_S:
            return False
        self._said = why, now
        return True

    def _look(self) -> tuple[_Signature | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> _Signature | None:
    """Return the file's state, time and mode of the inode included: a file that may be read at last has no
    other contents.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode
