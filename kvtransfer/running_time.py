"""A clock that stands still while this process does.

Whoever waits for a peer's word with it blames the peer for no stall of its own: what the peer said while this
process was stopped (SIGSTOP, a frozen container, a paused machine) lies unread and is heard first. Pure.
"""

from __future__ import annotations


class RunningTime:
    """Seconds that this process ran, of any monotonic clock's."""

    def __init__(self, most_s: float) -> None:
        """Of the time between two looks at it no more than `most_s` counts."""
        self._most_s = most_s
        self._looked_at: float | None = None
        self._ran_s = 0.0

    def at(self, now: float) -> float:
        """The time at `now`, from the first look on; `now` never goes back."""
        if self._looked_at is not None:
            self._ran_s += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._ran_s
