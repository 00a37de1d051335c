"""Files that operators replace while a process runs: keys, certificates."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 1.0


def readable_by_all(path: Path) -> bool:
    """Whether any user of this machine may read the file. Raises OSError when it is not there."""
    return bool(os.stat(path).st_mode & stat.S_IROTH)


class FileWatch:
    """Tells when one of some files has become another one: by its time, size or inode.

    The files are looked at once in ``every_s`` seconds, however often one asks. Any thread may ask.
    """

    def __init__(
        self, *paths: Path, every_s: float = LOOK_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._every_s = every_s
        self._clock = clock
        self._seen = self._look()
        self._next = clock() + every_s

    def changed(self) -> bool:
        """True once after each change. A file that is not there for a moment is no change."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._every_s
        found = self._look()
        if None in found or found == self._seen:
            return False
        self._seen = found
        return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
