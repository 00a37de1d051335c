"""Is the peer alive? Heartbeats in, verdicts out; the time is an argument, no clock is read.

The life of a lease: ALIVE while beats come, SUSPECT when they stop, UNLINKED when the stream broke,
FENCED when it was decided that the peer must not write again. Timers only escalate along this path: what
the peer may hold is given back by proof of its end, which is none of this file's business.

A timer counts only time in which this process itself ran: after a stall of our own loop (a SIGSTOP, a
starved machine) the beats lie unread in a socket, and to fence by the clock would kill a healthy peer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. A stopped peer is fenced within `fence_after_s` of its last beat, plus one interval."""

    interval_s: float = 0.25
    """Between beats, and between ticks."""
    suspect_after_s: float = 1.0
    fence_after_s: float = 2.0
    relink_grace_s: float = 1.0
    """How long a peer whose stream broke may take to come back and say Stopped."""
    stuck_after_s: float = 300.0
    """How long a busy engine may show no progress: longer than any one step."""
    late_after_s: float = 10.0
    """How far past its own prediction a step may be. Its requests have gone elsewhere long before."""


class LeasePhase(enum.Enum):
    """Where a peer is on the way from trusted to fenced."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    UNLINKED = "unlinked"
    FENCED = "fenced"


class Verdict(enum.Enum):
    """What a tick found."""

    NOTHING = "nothing"
    SUSPECT = "suspect"
    """Beats stopped: worth a line in the log."""
    GONE = "gone"
    """It must not write again: fence it if it holds blocks, else forget it."""


_LEGAL: dict[LeasePhase, frozenset[LeasePhase]] = {
    LeasePhase.ALIVE: frozenset({LeasePhase.SUSPECT, LeasePhase.UNLINKED, LeasePhase.FENCED}),
    LeasePhase.SUSPECT: frozenset({LeasePhase.ALIVE, LeasePhase.UNLINKED, LeasePhase.FENCED}),
    LeasePhase.UNLINKED: frozenset({LeasePhase.ALIVE, LeasePhase.FENCED}),
    LeasePhase.FENCED: frozenset(),
}


class Lease:
    """One peer's lease. `now` is any monotonic time in seconds, the same clock for all calls."""

    def __init__(self, now: float, times: LeaseTimes | None = None) -> None:
        self.times = times if times is not None else LeaseTimes()
        self.phase = LeasePhase.ALIVE
        self._heard_at = now
        self._moved_at = now
        self._stalls = StallClock(now, self.times.interval_s)
        self._unlinked_at = now
        self._progress: int | None = None
        self._busy = False
        self._late_s = 0.0

    def heard(self, now: float) -> None:
        """Any message of the peer arrived."""
        self._heard_at = now
        if self.phase is LeasePhase.SUSPECT:
            self._move(LeasePhase.ALIVE)

    def beat(self, now: float, progress: int, busy: bool, late_s: float = 0.0) -> None:
        """A heartbeat arrived; `progress` grows with every step of the peer's engine, whose running step is
        past its predicted end by `late_s`.
        """
        if progress != self._progress or not busy or not self._busy:
            self._moved_at = now
        self._progress, self._busy, self._late_s = progress, busy, late_s
        self.heard(now)

    def link_lost(self, now: float) -> None:
        """The peer's stream broke."""
        if self.phase in (LeasePhase.ALIVE, LeasePhase.SUSPECT):
            self._unlinked_at = now
            self._move(LeasePhase.UNLINKED)

    def link_up(self, now: float) -> None:
        """The same process came back. One that was fenced stays so."""
        self._heard_at = self._moved_at = now
        self._stalls.begin_at(now)
        self._busy = False
        self._late_s = 0.0
        if self.phase in (LeasePhase.UNLINKED, LeasePhase.SUSPECT):
            self._move(LeasePhase.ALIVE)

    def fence(self) -> None:
        """It was decided, here or elsewhere, that this peer must not write again."""
        if self.phase is not LeasePhase.FENCED:
            self._move(LeasePhase.FENCED)

    def tick(self, now: float) -> Verdict:
        """Call every interval. GONE is said once."""
        self._forgive(now)
        times = self.times
        if self.phase is LeasePhase.UNLINKED and now - self._unlinked_at >= times.relink_grace_s:
            self._move(LeasePhase.FENCED)
            return Verdict.GONE
        if self.phase in (LeasePhase.ALIVE, LeasePhase.SUSPECT):
            silent = now - self._heard_at
            stuck = self._late_s >= times.late_after_s
            stuck = stuck or (self._busy and now - self._moved_at >= times.stuck_after_s)
            if silent >= times.fence_after_s or stuck:
                self._move(LeasePhase.FENCED)
                return Verdict.GONE
            if silent >= times.suspect_after_s and self.phase is LeasePhase.ALIVE:
                self._move(LeasePhase.SUSPECT)
                return Verdict.SUSPECT
        return Verdict.NOTHING

    def _forgive(self, now: float) -> None:
        """Take the time that this process itself lost since the last tick off every timer."""
        if lost := self._stalls.lost_s(now):
            self._heard_at = min(now, self._heard_at + lost)
            self._moved_at = min(now, self._moved_at + lost)
            self._unlinked_at = min(now, self._unlinked_at + lost)

    def _move(self, phase: LeasePhase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"a lease cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase


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
