"""Leases of peers: heartbeats in, verdicts out; the time is an argument, no clock is read.

Phases of a lease:

    ALIVE      messages come
    SUSPECT    messages stopped
    UNLINKED   the stream broke
    FENCED     it was decided that the peer must not write again

Timers only escalate along this path, they never free a block: what the peer may hold is returned by proof of
its end, which transports bring. A timer counts only time in which this process itself ran. After a stall of
its own loop (a SIGSTOP, a starved machine) the heartbeats lie unread in a socket, and to fence by the clock
would kill a healthy peer.

A starved machine keeps the peer waiting as well, and not at the same moments: while ticks come late here,
silence there proves less. So patience with silence grows with the time that was lost lately (`Strain`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StallClock:
    """Detector of stalls of this process (SIGSTOP, a frozen container, a paused machine).

    Messages of a peer that came meanwhile lie unread and are read first: that time is no fault of the peer's.
    Checks are to be `interval_s` apart; `now` is seconds on any monotonic clock.
    """

    def __init__(self, now: float, interval_s: float) -> None:
        self._checked_at, self._interval_s = now, interval_s

    def stall_s(self, now: float) -> float:
        """Return the seconds lost since the last check, 0 if this check is about in time."""
        late = now - self._checked_at - self._interval_s
        self._checked_at = now
        return late if late > self._interval_s else 0.0

    def restart(self, now: float) -> None:
        """Forget every stall before `now`."""
        self._checked_at = now


class Strain:
    """The time that the machine took from this process lately, however short each piece was.

    A sum that halves every `HALF_LIFE_S`. On a calm machine ticks are some milliseconds late, which counts
    for nothing; where more threads want to run than there are cores each is late by tens or hundreds.
    """

    HALF_LIFE_S = 5.0
    JITTER_S = 0.01
    """Lateness of a tick that is no sign of anything."""
    PIECE_S = 0.5
    """Most that one tick counts: a process that was stopped says nothing of the machine."""

    def __init__(self, now: float, interval_s: float) -> None:
        self._checked_at, self._interval_s = now, interval_s
        self._lost_s = 0.0

    def tick(self, now: float) -> float:
        """Return the lost seconds at `now`. Ticks are to be `interval_s` apart."""
        passed = max(now - self._checked_at, 0.0)
        late = min(max(passed - self._interval_s - self.JITTER_S, 0.0), self.PIECE_S)
        self._checked_at = now
        self._lost_s = self._lost_s * 0.5 ** (passed / self.HALF_LIFE_S) + late
        return self._lost_s


class RunningTime:
    """Clock that stands still while this process does."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stalls: StallClock | None = None
        self._not_run_s = 0.0

    def at(self, now: float) -> float:
        """Return the running time at `now`, in seconds, counted from the first call on."""
        if self._stalls is None:
            self._stalls, self._not_run_s = StallClock(now, self._interval_s), now
        self._not_run_s += self._stalls.stall_s(now)
        return now - self._not_run_s


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. A stopped peer is fenced within `fence_after_s` of its last message, plus one interval.

    On a starved machine later, see `Strain`.
    """

    interval_s: float = 0.25
    """Seconds between heartbeats, and between ticks."""
    suspect_after_s: float = 1.0
    fence_after_s: float = 2.0
    starved_factor: float = 4.0
    """Most by which `fence_after_s` grows on a starved machine; each second lost lately adds `PATIENCE`."""
    relink_grace_s: float = 1.0
    """Seconds that a peer whose stream broke has to come back and send Stopped."""
    stuck_after_s: float = 300.0
    """Seconds without progress of a busy engine: longer than any one step."""
    late_after_s: float = 10.0
    """Seconds that a step may be past its predicted end. Its requests have gone elsewhere long before."""


PATIENCE = 3.0
"""Seconds of silence that are allowed for each second that the machine took from this process lately."""


class LeasePhase(enum.Enum):
    """Phase of a lease, from trusted to fenced."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    UNLINKED = "unlinked"
    FENCED = "fenced"


class Verdict(enum.Enum):
    """Result of a tick."""

    NONE = "none"
    SUSPECT = "suspect"
    """Messages stopped: worth a line in the log."""
    EXPIRED = "expired"
    """The peer must not write again: fence it if it holds blocks, else forget it."""


TRANSITIONS: dict[LeasePhase, frozenset[LeasePhase]] = {
    LeasePhase.ALIVE: frozenset({LeasePhase.SUSPECT, LeasePhase.UNLINKED, LeasePhase.FENCED}),
    LeasePhase.SUSPECT: frozenset({LeasePhase.ALIVE, LeasePhase.UNLINKED, LeasePhase.FENCED}),
    LeasePhase.UNLINKED: frozenset({LeasePhase.ALIVE, LeasePhase.FENCED}),
    LeasePhase.FENCED: frozenset(),
}


class Lease:
    """Lease of one peer. `now` is any monotonic time in seconds, the same clock for all calls."""

    def __init__(self, now: float, times: LeaseTimes | None = None) -> None:
        self.times = times if times is not None else LeaseTimes()
        self.phase = LeasePhase.ALIVE
        self._last_seen = now
        self._progress_at = now
        self._stalls = StallClock(now, self.times.interval_s)
        self._strain = Strain(now, self.times.interval_s)
        self._unlinked_at = now
        self._progress: int | None = None
        self._busy = False
        self._late_s = 0.0

    def on_message(self, now: float) -> None:
        """Record that a message of the peer arrived."""
        self._last_seen = now
        if self.phase is LeasePhase.SUSPECT:
            self._move(LeasePhase.ALIVE)

    def on_heartbeat(self, now: float, progress: int, busy: bool, late_s: float = 0.0) -> None:
        """Record a heartbeat.

        Args:
            now: seconds.
            progress: a counter that grows with every step of the peer's engine.
            busy: True while that engine has a step to run.
            late_s: seconds by which its running step is past its predicted end.
        """
        if progress != self._progress or not busy or not self._busy:
            self._progress_at = now
        self._progress, self._busy, self._late_s = progress, busy, late_s
        self.on_message(now)

    def link_lost(self, now: float) -> None:
        """Record that the peer's stream broke."""
        if self.phase in (LeasePhase.ALIVE, LeasePhase.SUSPECT):
            self._unlinked_at = now
            self._move(LeasePhase.UNLINKED)

    def link_up(self, now: float) -> None:
        """Record that the same process came back. A fenced one stays fenced."""
        self._last_seen = self._progress_at = now
        self._stalls.restart(now)
        self._busy = False
        self._late_s = 0.0
        if self.phase in (LeasePhase.UNLINKED, LeasePhase.SUSPECT):
            self._move(LeasePhase.ALIVE)

    def fence(self) -> None:
        """Record the decision, made here or elsewhere, that this peer must not write again."""
        if self.phase is not LeasePhase.FENCED:
            self._move(LeasePhase.FENCED)

    def tick(self, now: float) -> Verdict:
        """Return the verdict at time `now`; call it every interval. EXPIRED is returned once."""
        self._discount_stall(now)
        times = self.times
        patience_s = PATIENCE * self._strain.tick(now)
        fence_after_s = min(times.fence_after_s + patience_s, times.fence_after_s * times.starved_factor)
        if self.phase is LeasePhase.UNLINKED and now - self._unlinked_at >= times.relink_grace_s:
            self._move(LeasePhase.FENCED)
            return Verdict.EXPIRED
        if self.phase in (LeasePhase.ALIVE, LeasePhase.SUSPECT):
            silent = now - self._last_seen
            stuck = self._late_s >= times.late_after_s
            stuck = stuck or (self._busy and now - self._progress_at >= times.stuck_after_s)
            if silent >= fence_after_s or stuck:
                self._move(LeasePhase.FENCED)
                return Verdict.EXPIRED
            if silent >= times.suspect_after_s and self.phase is LeasePhase.ALIVE:
                self._move(LeasePhase.SUSPECT)
                return Verdict.SUSPECT
        return Verdict.NONE

    def _discount_stall(self, now: float) -> None:
        """Take the time that this process itself lost since the last tick off every timer."""
        if lost := self._stalls.stall_s(now):
            self._last_seen = min(now, self._last_seen + lost)
            self._progress_at = min(now, self._progress_at + lost)
            self._unlinked_at = min(now, self._unlinked_at + lost)

    def _move(self, phase: LeasePhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"a lease cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase


STALL_S = 10.0
"""Seconds without an acknowledgement, with blocks in flight, after which a link is given up."""


class TransferProgress:
    """Detector of a data connection that falls silent while its control stream lives.

    Heartbeats show that the other process is there, not that bytes reach it: a firewall that forgot one of
    two connections, or a communicator that hangs, leaves a commit waiting for blocks that never come. `now`
    is any monotonic time in seconds; time that this process lost is not counted.
    """

    def __init__(self, now: float, interval_s: float, stall_s: float = STALL_S) -> None:
        """Start at time `now`; `stalled` will be called every `interval_s` seconds."""
        self._stalls, self._stall_s = StallClock(now, interval_s), stall_s
        self._progress_at = now
        self._acknowledged = 0

    def stalled(self, now: float, sent: int, acknowledged: int) -> bool:
        """Return True if blocks are in flight and none was acknowledged for too long."""
        self._progress_at = min(now, self._progress_at + self._stalls.stall_s(now))
        if sent == acknowledged or acknowledged != self._acknowledged:
            self._acknowledged, self._progress_at = acknowledged, now
        return now - self._progress_at >= self._stall_s
