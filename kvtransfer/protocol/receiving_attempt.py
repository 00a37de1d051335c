"""An attempt as the decode side sees it.

The life of an attempt here:

    EXPECTED      the gateway attached it; its prefill has not asked yet
    EARLY         its prefill asked before the attach arrived; denied after a second
    WAITING       both are here, but there is no room; first come, first served
    GRANTED       blocks are given; the writer may write to them
    COMMITTED     the writer promised to stop, but blocks sent by a copying transport are still on their way
    QUARANTINED   given up while the writer may still write; leaves on Stopped, Commit or proof of its death
    OVER          handed over, failed or cancelled; nothing of it is kept
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtransfer.protocol.grant_table import Grant
from kvtransfer.protocol.messages import Key, PendingTransfer, WriterId


class Phase(enum.Enum):
    """Where an attempt is; the head of this file tells the story."""

    EXPECTED = "expected"
    ASKED_BEFORE_ATTACH = "early"
    WAITING = "waiting"
    GRANTED = "granted"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    OVER = "over"


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.EXPECTED: frozenset({Phase.WAITING, Phase.OVER}),
    Phase.ASKED_BEFORE_ATTACH: frozenset({Phase.WAITING, Phase.OVER}),
    Phase.WAITING: frozenset({Phase.GRANTED, Phase.OVER}),
    Phase.GRANTED: frozenset({Phase.COMMITTED, Phase.QUARANTINED, Phase.OVER}),
    Phase.COMMITTED: frozenset({Phase.OVER}),
    Phase.QUARANTINED: frozenset({Phase.OVER}),
    Phase.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class ReceivingAttempt:
    """What is known of it so far."""

    key: Key
    phase: Phase
    expected: PendingTransfer | None = None
    writer: WriterId | None = None
    grant: Grant | None = None
    since: float | None = None
    """The tick that first saw it EARLY, QUARANTINED, or COMMITTED and without news; None before."""

    @property
    def wanted(self) -> PendingTransfer:
        """What the gateway attached. RuntimeError before that."""
        if self.expected is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} was not attached")
        return self.expected

    @property
    def asker(self) -> WriterId:
        """Who asked. RuntimeError before that."""
        if self.writer is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} has no writer")
        return self.writer

    @property
    def held(self) -> Grant:
        """Its grant. RuntimeError before that."""
        if self.grant is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} has no grant")
        return self.grant

    def move(self, phase: Phase) -> None:
        """The one way to another phase. RuntimeError if there is no such way."""
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"an attempt cannot go from {self.phase.value} to {phase.value}")
        self.phase, self.since = phase, None


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds until a wait is escalated; waiting alone frees nothing."""

    early_ask_s: float = 1.0
    """An ask whose attach does not come is denied."""
    stopping_s: float = 30.0
    """A writer that was asked to stop and does not answer is fenced."""
    arriving_s: float = 5.0
    """Copies that a commit announced and of which none comes any more are given up: a frame whose header was
    damaged names no grant, and nobody would hear of it."""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Counts for metrics and the status page."""

    grants: int
    waiting_asks: int
    quarantined_blocks: int
    quarantine_age_s: float
    """Of the oldest quarantined grant; 0 when there is none."""
    stale_messages: int
