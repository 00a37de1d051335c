"""What this process itself missed, for whoever waits for a peer's word with it.

What the peer said while this process was stopped (SIGSTOP, a frozen container, a paused machine) lies unread
and is heard first: that time is no fault of the peer's. `now` is seconds on any monotonic clock. Pure.
"""

from __future__ import annotations


class StallClock:
    """Looks at the clock are to be `interval_s` apart."""

    def __init__(self, now: float, interval_s: float) -> None:
        self._looked_at, self._interval_s = now, interval_s

    def lost_s(self, now: float) -> float:
        """The time that this process lost since the last look; 0 where this one comes about in time."""
        late = now - self._looked_at - self._interval_s
        self._looked_at = now
        return late if late > self._interval_s else 0.0

    def begin_at(self, now: float) -> None:
        """Nothing that was missed before counts."""
        self._looked_at = now


class RunningTime:
    """A clock that stands still while this process does."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stalls: StallClock | None = None
        self._not_run_s = 0.0

    def at(self, now: float) -> float:
        """The time at `now`, from the first look on."""
        if self._stalls is None:
            self._stalls, self._not_run_s = StallClock(now, self._interval_s), now
        self._not_run_s += self._stalls.lost_s(now)
        return now - self._not_run_s
