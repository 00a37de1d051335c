"""The wait of new requests for workers that were there a moment ago, or are starting.

A gateway that was stopped, links that were cut and workers that are restarted leave a gap of a second or of a
few. A request that arrives then waits as a running one does, but not as long: other gateways may have some.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

FIRST_WAIT_S: Final = 10.0  # of a request that no worker has had yet: it can go elsewhere
START_WAIT_S: Final = 30.0  # of a request while the system starts
STARTING_S: Final = 120.0  # no longer than this after the gateway's start
MAX_WAITING: Final = 1024  # requests; more are refused at once


class ArrivalWait:
    """The new requests that wait for a pair of workers.

    Args:
        complete: returns whether a pair that fits together is linked.
        limit_s: the longest wait in seconds; 0 = none.
        clock: in seconds, monotonic.
    """

    def __init__(self, complete: Callable[[], bool], limit_s: float, clock: Callable[[], float]) -> None:
        self._complete, self._limit_s, self._clock = complete, limit_s, clock
        self._started_at = clock()
        self._complete_until = -math.inf
        self._was_complete = False
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Requests in the order of arrival, in which they go on."""

    def __len__(self) -> int:
        return len(self._waiting)

    def update(self) -> None:
        """Take note of a change among the workers."""
        complete = self._complete()
        if self._was_complete and not complete:
            self._complete_until = self._clock()
        self._was_complete = complete
        if complete:
            self.release()

    def release(self) -> None:
        """End all waits: workers are there, or the gateway shuts down."""
        for waiting in list(self._waiting):
            if not waiting.done():
                waiting.set_result(None)

    def wait_s(self) -> float:
        """Return for how many seconds a request that arrives now may wait; 0 = not at all."""
        if len(self._waiting) >= MAX_WAITING:
            return 0.0
        now = self._clock()
        seconds = self._complete_until + FIRST_WAIT_S - now
        if self._complete_until == -math.inf and not self._was_complete:
            seconds = min(START_WAIT_S, self._started_at + STARTING_S - now)
        return max(min(seconds, self._limit_s), 0.0)

    async def wait(self, deadline_s: float | None) -> None:
        """Wait for a pair, no longer than `wait_s` and ``deadline_s``; the caller looks whether one came."""
        if self._complete():
            return
        seconds = min(self.wait_s(), math.inf if deadline_s is None else deadline_s)
        if seconds <= 0:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await asyncio.wait({waiting}, timeout=seconds)
        finally:
            self._waiting.pop(waiting, None)
