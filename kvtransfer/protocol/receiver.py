"""State machine of the decode side: events in, actions out, no I/O, no clock.

Blocks have two lifetimes, the attempt's and the writer's, and return to the pool at the end of the later one.
A writer may come back by another transport: then what it had to fill before waits for the proof that the
transport of before brings.
Pins on the cached prefix end with the attempt, as no writer writes to those blocks; where the writer copies
them out of the mapped pool they last as long as the writer. A message counts only when it comes from the
writer of the grant that it names, generation included; any other is counted as stale.
Timers escalate, they never free a block. The phases of an attempt and its transitions stand at the head of
`transfer_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.window_groups import WindowGroups
from diptych.worker.v1.work_pb2 import FailureReason
from kvtransfer.protocol.grants import BlockAllocator, Grant, GrantGate
from kvtransfer.protocol.messages import (
    Fail,
    FenceWriter,
    FirstTokens,
    GrantRef,
    Handoff,
    Key,
    PendingTransfer,
    ReceiverAction,
    SendAbort,
    SendDenied,
    WriterId,
)
from kvtransfer.protocol.transfer_table import (
    EscalationTimeouts,
    ReceiverStats,
    ReceivingAttempt,
    TransferTable,
)
from kvtransfer.protocol.transfer_table import ReceiverPhase as Phase
from kvtransfer.protocol.window_allocator import WindowAllocator


@dataclass(frozen=True, slots=True)
class _Link:
    """Stream of a writer; the fields are those of `Receiver.link_up`."""

    in_place: bool
    transport: str
    reads_prefix: bool
    chunk: int


class Receiver:
    """State machine over the blocks of `pool`; `running()` is the number of sequences that decode now.

    `gate` knows what attempts need beside blocks; None: nothing. `groups` are those of layers that have
    blocks of their own (window_allocator.py); None: one block a place serves all layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        running: Callable[[], int],
        timeouts: EscalationTimeouts | None = None,
        gate: GrantGate | None = None,
        groups: WindowGroups | None = None,
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._allocator = (
            BlockAllocator(pool, block_size, running)
            if groups is None
            else WindowAllocator(pool, block_size, running, groups)
        )
        self._timeouts = timeouts if timeouts is not None else EscalationTimeouts()
        self._transfers = TransferTable(pool, self._allocator)
        self._links: dict[WriterId, _Link] = {}
        """Writers with a stream."""
        self._now = 0.0

    # -- the gateway's side

    def expect(self, pending: PendingTransfer) -> list[ReceiverAction]:
        """Take an attempt that the gateway attached. Raises ValueError if it is attached already."""
        if pending.num_tokens < 1:
            raise ValueError("an attempt needs at least one token")
        attempt = self._transfers.attempts.get(pending.key)
        if attempt is None:
            self._transfers.attempts[pending.key] = ReceivingAttempt(pending.key, Phase.ATTACHED, pending)
            return []
        if attempt.pending is not None:
            raise ValueError("this attempt is attached already")
        attempt.pending = pending
        return self._enqueue(attempt)

    def cancel(self, key: Key) -> list[ReceiverAction]:
        """End an attempt at any time; a no-op once it was handed off or has failed."""
        attempt = self._transfers.attempts.get(key)
        if attempt is None:
            return []
        return self._cancel(attempt, "the attempt was cancelled")

    def blocks_freed(self) -> list[ReceiverAction]:
        """Serve waiting asks after the pool gained room or fewer sequences run."""
        actions: list[ReceiverAction] = []
        while (attempt := self._transfers.next_waiting(self._gate)) is not None:
            link = self._links[attempt.requester]
            grant = self._transfers.try_grant(
                attempt, reads_prefix=link.reads_prefix, chunk=link.chunk, transport=link.transport
            )
            if grant is None:
                break
            if self._gate is not None:
                self._gate.granted(attempt.key)
            actions.append(grant)
        return actions

    def abort_newest_grant(self) -> tuple[Key | None, list[ReceiverAction]]:
        """Revoke the newest grant, whose blocks return once its writer stops; its key, None without one."""
        newest = self._transfers.grants.newest(lambda attempt: attempt.phase is Phase.GRANTED)
        if newest is None:
            return None, []
        return newest.key, self._cancel(newest, "the blocks were needed elsewhere")

    # -- the writer's side

    def link_up(
        self,
        writer: WriterId,
        *,
        in_place: bool,
        transport: str = "",
        reads_prefix: bool = False,
        chunk: int = 0,
    ) -> list[ReceiverAction]:
        """Record a writer's stream, and send Abort again for each of its quarantined grants.

        Args:
            transport: name of the transport by which it fills grants from now on.
            reads_prefix: the writer copies the cached prefix of its grants out of the mapped pool.
            chunk: the most tokens that it computes at once.
        """
        self._links[writer] = _Link(in_place, transport, reads_prefix, max(chunk, 1) if in_place else 0)
        return [SendAbort(writer, grant.ref) for grant in self._transfers.quarantined_by(writer)]

    def link_lost(self, writer: WriterId) -> list[ReceiverAction]:
        """Fail the attempts of a writer whose stream broke; as that proves nothing, quarantine its grants."""
        if self._links.pop(writer, None) is None:
            return []
        actions: list[ReceiverAction] = []
        for attempt in [a for a in self._transfers.attempts.values() if a.writer == writer]:
            actions += self._fail(
                attempt, FailureReason.FAILURE_REASON_PEER_LOST, "the prefill worker was lost"
            )
        return actions + self.blocks_freed()

    def writer_dead(self, writer: WriterId, transport: str) -> list[ReceiverAction]:
        """Release all grants of a writer that is proven to write no more by this transport.

        A stream by which it came to use another one since stays, and so does what it fills there.
        """
        link = self._links.get(writer)
        actions = self.link_lost(writer) if link is not None and link.transport == transport else []
        for grant in self._transfers.quarantined_by(writer):
            holder = self._transfers.grants.find(grant.ref.slot, grant.ref.generation)
            if holder is not None and grant.transport == transport:
                self._transfers.release(holder)
        return actions + self.blocks_freed()

    def ask(self, writer: WriterId, key: Key) -> list[ReceiverAction]:
        """Grant blocks to a prefill that is about to run, or queue or deny its ask."""
        if writer not in self._links:
            self._transfers.stale_messages += 1
            return []
        attempt = self._transfers.attempts.setdefault(key, ReceivingAttempt(key, Phase.ASKED_BEFORE_ATTACH))
        if attempt.writer is not None:
            self._transfers.stale_messages += 1
            text = "blocks for this attempt were asked for already"
            return [SendDenied(writer, key, FailureReason.FAILURE_REASON_INTERNAL, text)]
        attempt.writer = writer
        return self._enqueue(attempt) if attempt.pending is not None else []

    def withdraw(self, writer: WriterId, key: Key) -> list[ReceiverAction]:
        """End an ask that the writer withdraws; if a grant is on its way, the writer's Stopped follows."""
        attempt = self._transfers.attempts.get(key)
        if attempt is None or attempt.writer != writer or attempt.grant is not None:
            self._transfers.stale_messages += 1
            return []
        reason = FailureReason.FAILURE_REASON_PEER_LOST
        return self._fail(attempt, reason, "the prefill worker withdrew its ask") + self.blocks_freed()

    def pushed(
        self, writer: WriterId, ref: GrantRef, first_block: int, num_blocks: int, digests: Sequence[bytes]
    ) -> list[ReceiverAction]:
        """Record blocks that the writer wrote, with the digest of each; an in-place writer gives none."""
        attempt = self._transfers.find_open(writer, ref)
        if attempt is None:
            return []
        grant = attempt.open_grant
        indices = range(first_block, first_block + num_blocks)
        as_granted = attempt.phase is Phase.GRANTED and grant.may_write(indices)
        if not as_granted or len(digests) not in (0, num_blocks):
            return self._fail_corrupt(attempt, "blocks outside the granted table were announced")
        grant.pushed_digests.update(zip(indices, digests, strict=False))
        return []

    def resolve(self, writer: WriterId, slot: int, generation: int) -> GrantRef | None:
        """Return the full name of a writer's open grant, None unless it is open."""
        attempt = self._transfers.grants.find(slot, generation)
        if attempt is None or attempt.writer != writer:
            self._transfers.stale_messages += 1
            return None
        return attempt.open_grant.ref

    def destinations(self, writer: WriterId, ref: GrantRef, indices: range) -> list[int] | None:
        """Return the blocks into which these indices of a grant may be copied now, None for stale data."""
        attempt = self._transfers.find_open(writer, ref)
        if attempt is None or not attempt.open_grant.may_write(indices):
            return None
        return attempt.open_grant.block_ids[indices.start : indices.stop]

    def prefix_block(
        self, writer: WriterId, slot: int, generation: int, index: int
    ) -> tuple[GrantRef, int] | None:
        """Return the full name of a writer's grant and the block at `index`, which it may read now.

        None unless the grant is being filled and the block is of its cached prefix.
        """
        attempt = self._transfers.grants.find(slot, generation)
        if attempt is None or attempt.writer != writer or attempt.phase is not Phase.GRANTED:
            return None
        grant = attempt.open_grant
        return (grant.ref, grant.block_ids[index]) if index < grant.cached_blocks else None

    def arrived(
        self, writer: WriterId, ref: GrantRef, first: int, digests: Sequence[bytes]
    ) -> list[ReceiverAction]:
        """Record blocks that were copied to their destinations, from index `first` on, by their digests."""
        attempt = self._transfers.find_open(writer, ref)
        indices = range(first, first + len(digests))
        if attempt is None or not attempt.open_grant.may_write(indices):
            return []
        attempt.open_grant.arrived_digests.update(zip(indices, digests, strict=True))
        attempt.waiting_since = None  # more may follow
        return self._handoff_if_complete(attempt) if attempt.phase is Phase.COMMITTED else []

    def corrupt(self, writer: WriterId, ref: GrantRef) -> list[ReceiverAction]:
        """Fail the attempt of a block that arrived with bytes that do not match its digest."""
        attempt = self._transfers.find_open(writer, ref)
        if attempt is None:
            return []
        return self._fail_corrupt(attempt, "a block does not match its digest")

    def commit(
        self, writer: WriterId, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, note: object = None
    ) -> list[ReceiverAction]:
        """Hand a grant off once all of it has arrived; the writer promises that no further write comes."""
        attempt = self._transfers.find(writer, ref)
        if attempt is None or attempt.phase is Phase.COMMITTED:
            return []
        if attempt.phase is Phase.QUARANTINED:
            return self._end_quarantine(attempt)
        attempt.move(Phase.COMMITTED)
        grant = attempt.open_grant
        grant.first_tokens, grant.note = first_tokens, note
        if num_tokens != grant.num_tokens:
            text = f"{num_tokens} tokens were committed, {grant.num_tokens} were expected"
            return self._fail_corrupt(attempt, text)
        if not self._links[writer].in_place and not grant.all_pushed():
            return self._fail_corrupt(attempt, "blocks were committed that were never pushed")
        return self._handoff_if_complete(attempt)

    def stopped(
        self, writer: WriterId, ref: GrantRef, reason: int | None = None, message: str = ""
    ) -> list[ReceiverAction]:
        """Release a grant of which the writer promises that no further write comes, and fail its attempt."""
        attempt = self._transfers.find(writer, ref)
        if attempt is None or attempt.phase is Phase.COMMITTED:
            return []
        if attempt.phase is Phase.QUARANTINED:
            return self._end_quarantine(attempt)
        if reason is None or reason == FailureReason.FAILURE_REASON_DRAINING:
            # The gateway takes this worker for the sender of the failure, and it is the writer that leaves.
            reason = FailureReason.FAILURE_REASON_PEER_LOST
        self._transfers.release(attempt)
        return [Fail(attempt.key, reason, message or "the prefill worker stopped"), *self.blocks_freed()]

    # -- time and numbers

    def tick(self, now: float) -> list[ReceiverAction]:
        """Escalate what has waited too long. Waits are counted from the first tick that sees them."""
        self._now = now
        actions: list[ReceiverAction] = []
        for attempt in self._transfers.in_phase(Phase.ASKED_BEFORE_ATTACH):
            if self._waited_s(attempt) >= self._timeouts.attach_s:
                reason = FailureReason.FAILURE_REASON_PEER_LOST
                actions += self._deny(attempt, reason, "the gateway did not attach this attempt")
        for attempt in self._transfers.in_phase(Phase.COMMITTED):
            # No late write can do harm: only a frame that names an open grant is copied.
            if self._waited_s(attempt) >= self._timeouts.arrival_s:
                actions += self._fail_corrupt(attempt, "blocks that were committed did not arrive")
        overdue: dict[WriterId, None] = {}
        for attempt in self._transfers.grants:
            if attempt.phase is Phase.QUARANTINED and self._waited_s(attempt) >= self._timeouts.stop_s:
                overdue[attempt.requester] = None
        actions += [FenceWriter(writer, "it does not stop writing an aborted grant") for writer in overdue]
        return actions

    def has_quarantined(self, writer: WriterId) -> bool:
        """Return True if blocks are quarantined because this writer may still write to them."""
        return bool(self._transfers.quarantined_by(writer))

    def quarantined_transports(self, writer: WriterId) -> set[str]:
        """Return the transports by which this writer may still write to quarantined blocks."""
        return {grant.transport for grant in self._transfers.quarantined_by(writer)}

    @property
    def num_grants(self) -> int:
        """The number of grants that are being filled, those in quarantine excluded."""
        return self._transfers.num_grants

    def stats(self) -> ReceiverStats:
        """Return the counts at the last tick."""
        return self._transfers.stats(self._now)

    def open_grants(self) -> list[tuple[WriterId, Grant]]:
        """Return every grant that a writer may still write to, quarantined ones included. For checks."""
        return [(a.requester, a.grant) for a in self._transfers.grants if a.grant is not None]

    # -- transitions

    def _enqueue(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        self._transfers.enqueue(attempt)
        blocks = self._allocator.blocks_needed(attempt.attached, self._chunk_of(attempt))
        if blocks > self._pool.total:
            text = f"{blocks} blocks are needed, the pool has {self._pool.total}"
            return self._deny(attempt, FailureReason.FAILURE_REASON_EXCEEDS_KV_CAPACITY, text)
        return self.blocks_freed()

    def _handoff_if_complete(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        grant, writer = attempt.open_grant, attempt.requester
        in_place = self._links[writer].in_place
        if not in_place:
            if not grant.all_arrived():
                return []
            if grant.digests_differ():
                return self._fail_corrupt(attempt, "a block differs from what was pushed")
        self._transfers.hand_off(attempt)
        cached_tokens = self._allocator.tokens_in(grant.cached_blocks)
        places = self._allocator.places_for(grant.num_tokens)
        done = Handoff(
            writer,
            grant.ref,
            grant.block_ids[:places] + grant.block_ids[grant.num_blocks :],
            cached_tokens,
            grant.num_tokens,
            grant.first_tokens,
            in_place,
            grant.note,
            grant.window_pins,
            grant.ring,
        )
        return [done]

    def _chunk_of(self, attempt: ReceivingAttempt) -> int:
        return self._links[attempt.requester].chunk

    def _deny(self, attempt: ReceivingAttempt, reason: int, message: str) -> list[ReceiverAction]:
        writer = attempt.requester
        return [SendDenied(writer, attempt.key, reason, message), *self._fail(attempt, reason, message)]

    def _fail(self, attempt: ReceivingAttempt, reason: int, message: str) -> list[ReceiverAction]:
        """End the attempt from this side, whatever its phase; report it if the gateway attached it."""
        if attempt.phase is Phase.GRANTED:
            self._transfers.quarantine(attempt)
        elif attempt.phase is Phase.COMMITTED:
            self._transfers.release(attempt)
        else:
            self._transfers.drop(attempt)
        return [Fail(attempt.key, reason, message)] if attempt.pending is not None else []

    def _fail_corrupt(self, attempt: ReceivingAttempt, message: str) -> list[ReceiverAction]:
        """Fail an attempt whose blocks cannot be used, with Abort unless its writer promised to stop."""
        actions: list[ReceiverAction] = []
        if attempt.phase is Phase.GRANTED:
            actions.append(SendAbort(attempt.requester, attempt.open_grant.ref))
        actions += self._fail(attempt, FailureReason.FAILURE_REASON_KV_TRANSFER_FAILED, message)
        return actions + self.blocks_freed()

    def _cancel(self, attempt: ReceivingAttempt, message: str) -> list[ReceiverAction]:
        """End an attempt without a Fail, with Abort or a denial for its writer."""
        actions: list[ReceiverAction] = []
        if attempt.phase is Phase.GRANTED:
            actions.append(SendAbort(attempt.requester, attempt.open_grant.ref))
        elif attempt.phase in (Phase.ASKED_BEFORE_ATTACH, Phase.WAITING):
            actions.append(SendDenied(attempt.requester, attempt.key, None, message))
        self._fail(attempt, FailureReason.FAILURE_REASON_UNSPECIFIED, message)
        return actions + self.blocks_freed()

    def _end_quarantine(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        self._transfers.release(attempt)
        return self.blocks_freed()

    def _waited_s(self, attempt: ReceivingAttempt) -> float:
        if attempt.waiting_since is None:
            attempt.waiting_since = self._now
        return self._now - attempt.waiting_since
