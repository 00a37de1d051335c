"""Return of freed heap memory to the system (glibc's ``malloc_trim``; elsewhere nothing).

glibc gives back the end of its heaps only. After many large answers were freed, small live objects between them
keep the pages: a gateway with 72 stalled streams took 83 to 239 MiB and kept 139 after their end.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

DELAY_S = 1.0  # what is freed together is returned together
_TRIM_ALL = 0


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


class HeapTrim:
    """Trimmer of this process's heap: at most once in `DELAY_S`, in a thread."""

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Trim the heap soon; to be called on the event loop."""
        if self._trim is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._run)

    def _run(self) -> None:
        self._timer = None
        if self._trim is not None:
            # ctypes releases the GIL meanwhile.
            asyncio.get_running_loop().run_in_executor(None, self._trim, _TRIM_ALL)
