"""Attempts of the decode side: phases, grants and blocks, changed together so that none can be forgotten.

The rules (`receiver`) decide; this table carries the decision out. Phases of an attempt:

    ATTACHED              the gateway attached the attempt; its prefill has not asked for blocks yet
    ASKED_BEFORE_ATTACH   its prefill asked before the attach arrived; denied after a second
    WAITING               both sides are here but there is no room; served by priority, then first come
    GRANTED               blocks are granted; the writer may write to them
    COMMITTED             the writer promised to stop; blocks of a copying transport are still on their way
    QUARANTINED           ended while the writer may still write; leaves on Stopped, Commit or proof of death
    OVER                  handed off, failed or cancelled; nothing of the attempt is kept
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.grants import BlockAllocator, Grant, GrantGate, GrantTable
from kvtransfer.protocol.messages import GrantRef, Key, PendingTransfer, SendGrant, WriterId


class ReceiverPhase(enum.Enum):
    """Phase of an attempt on the decode side, as listed at the head of this file."""

    ATTACHED = "attached"
    ASKED_BEFORE_ATTACH = "asked before attach"
    WAITING = "waiting"
    GRANTED = "granted"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    OVER = "over"


TRANSITIONS: dict[ReceiverPhase, frozenset[ReceiverPhase]] = {
    ReceiverPhase.ATTACHED: frozenset({ReceiverPhase.WAITING, ReceiverPhase.OVER}),
    ReceiverPhase.ASKED_BEFORE_ATTACH: frozenset({ReceiverPhase.WAITING, ReceiverPhase.OVER}),
    ReceiverPhase.WAITING: frozenset({ReceiverPhase.GRANTED, ReceiverPhase.OVER}),
    ReceiverPhase.GRANTED: frozenset(
        {ReceiverPhase.COMMITTED, ReceiverPhase.QUARANTINED, ReceiverPhase.OVER}
    ),
    ReceiverPhase.COMMITTED: frozenset({ReceiverPhase.OVER}),
    ReceiverPhase.QUARANTINED: frozenset({ReceiverPhase.OVER}),
    ReceiverPhase.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class ReceivingAttempt:
    """State of one attempt on the decode side."""

    key: Key
    phase: ReceiverPhase
    pending: PendingTransfer | None = None
    writer: WriterId | None = None
    grant: Grant | None = None
    waiting_since: float | None = None
    """Time of the first tick in a phase with a timeout, in COMMITTED since the last arrival; None before."""

    @property
    def attached(self) -> PendingTransfer:
        """The attempt as the gateway attached it. Raises RuntimeError before the attach."""
        if self.pending is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} was not attached")
        return self.pending

    @property
    def requester(self) -> WriterId:
        """The writer that asked for blocks. Raises RuntimeError before the ask."""
        if self.writer is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} has no writer")
        return self.writer

    @property
    def open_grant(self) -> Grant:
        """The grant of the attempt. Raises RuntimeError before the grant."""
        if self.grant is None:
            raise RuntimeError(f"an attempt that is {self.phase.value} has no grant")
        return self.grant

    def move(self, phase: ReceiverPhase) -> None:
        """Change the phase. Raises RuntimeError for a transition that is not in TRANSITIONS."""
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"an attempt cannot go from {self.phase.value} to {phase.value}")
        self.phase, self.waiting_since = phase, None


@dataclass(frozen=True, slots=True)
class EscalationTimeouts:
    """Seconds until a wait is escalated; waiting alone frees nothing."""

    attach_s: float = 1.0
    """Time without its attach after which an ask is denied."""
    stop_s: float = 30.0
    """Time without an answer to Abort after which the writer is fenced."""
    arrival_s: float = 5.0
    """Copies that a commit announced and of which none comes any more are given up: a frame whose header was
    damaged names no grant, and no error would be seen."""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Counts for metrics and the status page."""

    grants: int
    waiting_asks: int
    quarantined_blocks: int
    quarantine_age_s: float
    """Age in seconds of the oldest quarantined grant; 0 without one."""
    stale_messages: int


class TransferTable:
    """Attempts and grants over one pool, whose blocks `allocator` allocates."""

    def __init__(self, pool: BlockPool, allocator: BlockAllocator) -> None:
        self._pool = pool
        self._allocator = allocator
        self.attempts: dict[Key, ReceivingAttempt] = {}
        """Attempts that are neither QUARANTINED nor OVER."""
        self.waiting: dict[Key, ReceivingAttempt] = {}
        """Attempts in WAITING, in order of arrival."""
        self.grants: GrantTable[ReceivingAttempt] = GrantTable()
        self.stale_messages = 0
        """Number of messages that named nothing that is open."""

    def in_phase(self, *phases: ReceiverPhase) -> list[ReceivingAttempt]:
        """Return the attempts in one of these phases."""
        return [attempt for attempt in self.attempts.values() if attempt.phase in phases]

    def enqueue(self, attempt: ReceivingAttempt) -> None:
        """Move an attempt of which both sides are here to the queue for blocks."""
        attempt.move(ReceiverPhase.WAITING)
        self.waiting[attempt.key] = attempt

    def next_waiting(self, gate: GrantGate | None = None) -> ReceivingAttempt | None:
        """Return the waiting attempt of the highest priority, the first come of equals; None without one.

        No other attempt overtakes it: an attempt that needs many blocks would never get them. Those that
        `gate` keeps back are passed over.
        """
        waiting: Iterable[ReceivingAttempt] = self.waiting.values()
        if gate is not None:
            waiting = [attempt for attempt in waiting if gate.may_grant(attempt.key)]
        return max(waiting, key=lambda attempt: attempt.attached.priority, default=None)

    def try_grant(
        self, attempt: ReceivingAttempt, *, reads_prefix: bool = False, chunk: int = 0, transport: str = ""
    ) -> SendGrant | None:
        """Grant blocks to a waiting attempt; None while there is no room. `chunk` as the allocator has it."""
        allocation = self._allocator.allocate(attempt.attached, chunk)
        if allocation is None:
            return None
        ref = self.grants.open(attempt.key, attempt)
        grant = Grant(
            ref,
            allocation.block_ids,
            allocation.cached_blocks,
            allocation.writable_blocks,
            attempt.attached.num_tokens,
            reads_prefix,
            transport,
            allocation.window_pins,
            allocation.ring,
        )
        attempt.grant = grant
        del self.waiting[attempt.key]
        attempt.move(ReceiverPhase.GRANTED)
        places = self._allocator.places_for(grant.num_tokens)
        block_ids = (*grant.block_ids[:places], *grant.ring)
        cached_tokens = self._allocator.tokens_in(grant.cached_blocks)
        return SendGrant(attempt.requester, ref, block_ids, cached_tokens, grant.window_pins)

    def hand_off(self, attempt: ReceivingAttempt) -> None:
        """End an attempt whose blocks, references included, have a new owner now."""
        self.grants.close(attempt.open_grant.ref)
        self.drop(attempt)

    def quarantine(self, attempt: ReceivingAttempt) -> None:
        """End an attempt whose writer may still write.

        The prefix is unpinned at once unless the writer reads it there. The rest is quarantined until there
        is proof that the writer stopped.
        """
        grant = attempt.open_grant
        if not grant.reads_prefix:
            self._pool.release(grant.pinned)
        self._pool.quarantine(grant.allocated)
        del self.attempts[attempt.key]
        attempt.move(ReceiverPhase.QUARANTINED)

    def release(self, attempt: ReceivingAttempt) -> None:
        """End an attempt whose writer writes no more: return all its blocks to the pool."""
        grant = attempt.open_grant
        self.grants.close(grant.ref)
        if attempt.phase is ReceiverPhase.QUARANTINED:
            if grant.reads_prefix:
                self._pool.release(grant.pinned)
            self._pool.release_quarantined(grant.allocated)
            attempt.move(ReceiverPhase.OVER)
        else:
            self._pool.release(grant.held)
            self.drop(attempt)

    def drop(self, attempt: ReceivingAttempt) -> None:
        """End an attempt that holds no blocks."""
        del self.attempts[attempt.key]
        self.waiting.pop(attempt.key, None)
        attempt.move(ReceiverPhase.OVER)

    def find(self, writer: WriterId, ref: GrantRef) -> ReceivingAttempt | None:
        """Return the attempt that holds this very grant, None unless it is open and this writer's."""
        attempt = self.grants.find(ref.slot, ref.generation)
        if attempt is None or attempt.writer != writer or attempt.key != ref.key:
            self.stale_messages += 1
            return None
        return attempt

    def find_open(self, writer: WriterId, ref: GrantRef) -> ReceivingAttempt | None:
        """Return the attempt as `find` does, but None for a quarantined one."""
        attempt = self.find(writer, ref)
        return attempt if attempt is not None and attempt.phase is not ReceiverPhase.QUARANTINED else None

    def quarantined_by(self, writer: WriterId) -> list[Grant]:
        """Return the grants that are quarantined because this writer may still write to them."""
        return [
            a.open_grant for a in self.grants if a.phase is ReceiverPhase.QUARANTINED and a.writer == writer
        ]

    @property
    def num_grants(self) -> int:
        """The number of open grants outside quarantine."""
        return sum(attempt.phase is not ReceiverPhase.QUARANTINED for attempt in self.grants)

    def stats(self, now: float) -> ReceiverStats:
        """Return the counts at time `now`."""
        quarantined = [a for a in self.grants if a.phase is ReceiverPhase.QUARANTINED]
        return ReceiverStats(
            grants=self.num_grants,
            waiting_asks=len(self.waiting),
            quarantined_blocks=self._pool.quarantined(),
            quarantine_age_s=max(
                (now - a.waiting_since for a in quarantined if a.waiting_since is not None), default=0.0
            ),
            stale_messages=self.stale_messages,
        )
