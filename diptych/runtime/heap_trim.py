"""Release of garbage, and return of freed heap memory to the system.

Requests that fail leave reference cycles, which hold what they had until Python's oldest generation is
collected. glibc gives back the end of its heaps only: small live objects keep the pages of large freed ones
around them. ``malloc_trim`` returns those too; other C libraries have none.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
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
    """Trimmer of this process's heap: at most once in `DELAY_S`."""

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Collect and trim soon; to be called on the event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._run)

    def _run(self) -> None:
        self._timer = None
        gc.collect()  # short: programs freeze what lives since their start (`diptych.runtime.process`)
        if self._trim is not None:
            # ctypes releases the GIL meanwhile.
            asyncio.get_running_loop().run_in_executor(None, self._trim, _TRIM_ALL)
