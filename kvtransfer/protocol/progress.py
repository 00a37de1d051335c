"""Does what was sent arrive? For a data connection that falls silent while its control stream lives.

Heartbeats say that the other process is there, not that our bytes reach it: a firewall that forgot one of two
connections, or a communicator that hangs, leaves a commit waiting for blocks that never come.
"""

from __future__ import annotations

from kvtransfer.protocol.stall_clock import StallClock

STALL_S = 10.0
"""A link on which nothing was acknowledged for so long, with blocks under way, is given up."""


class Progress:
    """Of one channel. `now` is any monotonic time in seconds; time that this process lost is not counted."""

    def __init__(self, now: float, interval_s: float, stall_s: float = STALL_S) -> None:
        """`interval_s` is how often `stalled` will be asked."""
        self._stalls, self._stall_s = StallClock(now, interval_s), stall_s
        self._moved_at = now
        self._acknowledged = 0

    def stalled(self, now: float, sent: int, acknowledged: int) -> bool:
        """Whether blocks are under way and none arrived for too long."""
        self._moved_at = min(now, self._moved_at + self._stalls.lost_s(now))
        if sent == acknowledged or acknowledged != self._acknowledged:
            self._acknowledged, self._moved_at = acknowledged, now
        return now - self._moved_at >= self._stall_s
