"""Every attempt on the decode side with the blocks that it holds: one place for phases and pool.

The rules of the handoff (`receiver`) decide; here a decision changes an attempt's phase, its grant and its
blocks together, so that none can be forgotten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.grants import BlockAllocator, Grant, GrantTable
from kvtransfer.protocol.messages import GrantRef, Key, PendingTransfer, SendGrant, WriterId


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


class TransferTable:
    """Attempts and grants over one pool, with what is drawn on its `credit`."""

    def __init__(self, pool: BlockPool, credit: BlockAllocator) -> None:
        self._pool = pool
        self._credit = credit
        self.open: dict[Key, ReceivingAttempt] = {}
        """Every attempt that is neither QUARANTINED nor OVER."""
        self.queue: dict[Key, ReceivingAttempt] = {}
        """Those WAITING, in the order in which they came."""
        self.table: GrantTable[ReceivingAttempt] = GrantTable()
        self.stale = 0
        """Messages that named nothing that is open."""

    def in_phase(self, *phases: Phase) -> list[ReceivingAttempt]:
        """The open attempts in one of these phases."""
        return [attempt for attempt in self.open.values() if attempt.phase in phases]

    def wait(self, attempt: ReceivingAttempt) -> None:
        """Both sides of the attempt are here: it stands in line for blocks."""
        attempt.move(Phase.WAITING)
        self.queue[attempt.key] = attempt

    def next_in_line(self) -> ReceivingAttempt | None:
        """Whose turn it is to be given blocks. Nobody else passes: who wants many would never have them."""
        return max(self.queue.values(), key=lambda attempt: attempt.wanted.priority, default=None)

    def try_grant(self, attempt: ReceivingAttempt) -> SendGrant | None:
        """Give blocks to an attempt that waits; None: there is no room now."""
        drawn = self._credit.draw(attempt.wanted)
        if drawn is None:
            return None
        ref = self.table.open(attempt.key, attempt)
        grant = Grant(
            ref, drawn.block_ids, drawn.cached_blocks, drawn.writable_blocks, attempt.wanted.num_tokens
        )
        attempt.grant = grant
        del self.queue[attempt.key]
        attempt.move(Phase.GRANTED)
        told = tuple(grant.block_ids[: grant.num_blocks])
        return SendGrant(attempt.asker, ref, told, self._credit.tokens(grant.cached_blocks))

    def give_away(self, attempt: ReceivingAttempt) -> None:
        """Its blocks belong to somebody else now, references included."""
        self.table.close(attempt.held.ref)
        self.forget(attempt)

    def quarantine(self, attempt: ReceivingAttempt) -> None:
        """Nobody wants it, but its writer may still write: pins drop at once, the rest waits for proof."""
        grant = attempt.held
        self._pool.release(grant.pins)
        self._pool.quarantine(grant.fresh)
        del self.open[attempt.key]
        attempt.move(Phase.QUARANTINED)

    def end(self, attempt: ReceivingAttempt) -> None:
        """Nobody writes to the grant any more and nobody wants it: all its blocks go back."""
        grant = attempt.held
        self.table.close(grant.ref)
        if attempt.phase is Phase.QUARANTINED:
            self._pool.release_quarantined(grant.fresh)
            attempt.move(Phase.OVER)
        else:
            self._pool.release(grant.block_ids)
            self.forget(attempt)

    def forget(self, attempt: ReceivingAttempt) -> None:
        """An attempt that holds nothing is over."""
        del self.open[attempt.key]
        self.queue.pop(attempt.key, None)
        attempt.move(Phase.OVER)

    def find(self, writer: WriterId, ref: GrantRef) -> ReceivingAttempt | None:
        """The attempt with this very grant, if it is open and this writer's."""
        attempt = self.table.find(ref.slot, ref.generation)
        if attempt is None or attempt.writer != writer or attempt.key != ref.key:
            self.stale += 1
            return None
        return attempt

    def find_open(self, writer: WriterId, ref: GrantRef) -> ReceivingAttempt | None:
        """Like `find`, but not what is in quarantine: that is waiting for one word only."""
        attempt = self.find(writer, ref)
        return attempt if attempt is not None and attempt.phase is not Phase.QUARANTINED else None

    def quarantined_by(self, writer: WriterId) -> list[Grant]:
        """What is out of use because this writer might still write to it."""
        return [a.held for a in self.table if a.phase is Phase.QUARANTINED and a.writer == writer]

    @property
    def num_grants(self) -> int:
        """Open ones that are not in quarantine."""
        return sum(attempt.phase is not Phase.QUARANTINED for attempt in self.table)

    def stats(self, now: float) -> ReceiverStats:
        """The numbers of this moment."""
        quarantined = [a for a in self.table if a.phase is Phase.QUARANTINED]
        return ReceiverStats(
            grants=self.num_grants,
            waiting_asks=len(self.queue),
            quarantined_blocks=self._pool.quarantined(),
            quarantine_age_s=max((now - a.since for a in quarantined if a.since is not None), default=0.0),
            stale_messages=self.stale,
        )
