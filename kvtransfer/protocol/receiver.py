"""The decode side of the handoff as a state machine: events in, actions out, no I/O, no clock.

Blocks have two lifetimes, the attempt's and the writer's, and go back to the pool at the end of the later
one. Pins on the cached prefix end with the attempt: no writer touches those blocks. A message is believed
only from the writer of the grant that it names, generation included; anything else is counted as stale.
The phases of an attempt are told in `receiving_attempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.engine.kv.block_pool import BlockPool
from diptych.worker.v1.work_pb2 import FailureReason
from kvtransfer.protocol.block_allocation import BlockAllocator
from kvtransfer.protocol.grant_table import Grant
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
from kvtransfer.protocol.receiving_attempt import Patience, Phase, ReceiverStats, ReceivingAttempt
from kvtransfer.protocol.transfer_table import TransferTable


class Receiver:
    """Grants blocks of `pool`; `running()` is the number of decoding sequences, one spare block for each."""

    def __init__(
        self, pool: BlockPool, block_size: int, running: Callable[[], int], patience: Patience | None = None
    ) -> None:
        self._pool = pool
        self._credit = BlockAllocator(pool, block_size, running)
        self._patience = patience if patience is not None else Patience()
        self._book = TransferTable(pool, self._credit)
        # Writers with a stream, True when they write in place.
        self._links: dict[WriterId, bool] = {}
        self._now = 0.0

    # -- the gateway's side

    def expect(self, expected: PendingTransfer) -> list[ReceiverAction]:
        """The attempt was attached. ValueError if it already is."""
        if expected.num_tokens < 1:
            raise ValueError("an attempt needs at least one token")
        attempt = self._book.open.get(expected.key)
        if attempt is None:
            self._book.open[expected.key] = ReceivingAttempt(expected.key, Phase.EXPECTED, expected)
            return []
        if attempt.expected is not None:
            raise ValueError("this attempt is expected already")
        attempt.expected = expected
        return self._wait(attempt)

    def cancel(self, key: Key) -> list[ReceiverAction]:
        """The attempt is over; legal at any time, and a no-op once it was handed over or has failed."""
        attempt = self._book.open.get(key)
        if attempt is None:
            return []
        return self._give_up(attempt, "the attempt was cancelled")

    def blocks_freed(self) -> list[ReceiverAction]:
        """The pool has more room, or fewer sequences run: serve waiting asks."""
        actions: list[ReceiverAction] = []
        while (attempt := self._book.next_in_line()) is not None:
            grant = self._book.try_grant(attempt)
            if grant is None:
                break
            actions.append(grant)
        return actions

    def abort_newest_grant(self) -> tuple[Key | None, list[ReceiverAction]]:
        """Take the newest grant back; its blocks return once its writer stops. None: there is none."""
        newest = self._book.table.newest(lambda attempt: attempt.phase is Phase.GRANTED)
        if newest is None:
            return None, []
        return newest.key, self._give_up(newest, "the blocks were needed elsewhere")

    # -- the writer's side

    def link_up(self, writer: WriterId, *, in_place: bool) -> list[ReceiverAction]:
        """A writer has a stream (again). What it left in quarantine is asked for once more."""
        self._links[writer] = in_place
        return [SendAbort(writer, grant.ref) for grant in self._book.quarantined_by(writer)]

    def link_lost(self, writer: WriterId) -> list[ReceiverAction]:
        """Its stream broke: its attempts fail, and as that proves nothing, its grants are quarantined."""
        if self._links.pop(writer, None) is None:
            return []
        actions: list[ReceiverAction] = []
        for attempt in [a for a in self._book.open.values() if a.writer == writer]:
            actions += self._fail(
                attempt, FailureReason.FAILURE_REASON_PEER_LOST, "the prefill worker was lost"
            )
        return actions + self.blocks_freed()

    def writer_dead(self, writer: WriterId) -> list[ReceiverAction]:
        """Proven: nothing of this writer can be written any more."""
        actions = self.link_lost(writer)
        for grant in self._book.quarantined_by(writer):
            holder = self._book.table.find(grant.ref.slot, grant.ref.generation)
            if holder is not None:
                self._book.end(holder)
        return actions + self.blocks_freed()

    def ask(self, writer: WriterId, key: Key) -> list[ReceiverAction]:
        """A prefill is about to run and wants blocks."""
        if writer not in self._links:
            self._book.stale += 1
            return []
        attempt = self._book.open.setdefault(key, ReceivingAttempt(key, Phase.ASKED_BEFORE_ATTACH))
        if attempt.writer is not None:
            self._book.stale += 1
            text = "blocks for this attempt were asked for already"
            return [SendDenied(writer, key, FailureReason.FAILURE_REASON_INTERNAL, text)]
        attempt.writer = writer
        return self._wait(attempt) if attempt.expected is not None else []

    def withdraw(self, writer: WriterId, key: Key) -> list[ReceiverAction]:
        """The writer takes its ask back. If a grant is on its way, its Stopped will follow."""
        attempt = self._book.open.get(key)
        if attempt is None or attempt.writer != writer or attempt.grant is not None:
            self._book.stale += 1
            return []
        reason = FailureReason.FAILURE_REASON_PEER_LOST
        return self._fail(attempt, reason, "the prefill worker took its ask back") + self.blocks_freed()

    def pushed(
        self, writer: WriterId, ref: GrantRef, first_block: int, num_blocks: int, digests: Sequence[bytes]
    ) -> list[ReceiverAction]:
        """The writer says that blocks are written; a copying one gives the digest of each."""
        attempt = self._book.find_open(writer, ref)
        if attempt is None:
            return []
        grant = attempt.held
        places = range(first_block, first_block + num_blocks)
        as_granted = attempt.phase is Phase.GRANTED and grant.owes(places)
        if not as_granted or len(digests) not in (0, num_blocks):
            return self._corrupt(attempt, "blocks outside the granted table were announced")
        grant.declared.update(zip(places, digests, strict=False))
        return []

    def named(self, writer: WriterId, slot: int, generation: int) -> GrantRef | None:
        """The full name of a writer's open grant."""
        attempt = self._book.table.find(slot, generation)
        if attempt is None or attempt.writer != writer:
            self._book.stale += 1
            return None
        return attempt.held.ref

    def destinations(self, writer: WriterId, ref: GrantRef, places: range) -> list[int] | None:
        """The blocks into which these places of a grant may be copied now; None: the data is stale."""
        attempt = self._book.find_open(writer, ref)
        if attempt is None or not attempt.held.owes(places):
            return None
        return attempt.held.block_ids[places.start : places.stop]

    def arrived(
        self, writer: WriterId, ref: GrantRef, first: int, digests: Sequence[bytes]
    ) -> list[ReceiverAction]:
        """Blocks from place `first` on were copied to their destinations; their bytes have these digests."""
        attempt = self._book.find_open(writer, ref)
        places = range(first, first + len(digests))
        if attempt is None or not attempt.held.owes(places):
            return []
        attempt.held.received.update(zip(places, digests, strict=True))
        attempt.since = None  # more may follow
        return self._handoff_if_complete(attempt) if attempt.phase is Phase.COMMITTED else []

    def corrupt(self, writer: WriterId, ref: GrantRef) -> list[ReceiverAction]:
        """A block arrived whose bytes do not match its digest."""
        attempt = self._book.find_open(writer, ref)
        if attempt is None:
            return []
        return self._corrupt(attempt, "a block does not match its digest")

    def commit(
        self, writer: WriterId, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, note: object = None
    ) -> list[ReceiverAction]:
        """The writer is done with the grant and promises no further write."""
        attempt = self._book.find(writer, ref)
        if attempt is None or attempt.phase is Phase.COMMITTED:
            return []
        if attempt.phase is Phase.QUARANTINED:
            return self._end_quarantine(attempt)
        attempt.move(Phase.COMMITTED)
        grant = attempt.held
        grant.first_tokens, grant.note = first_tokens, note
        if num_tokens != grant.num_tokens:
            text = f"{num_tokens} tokens were committed, {grant.num_tokens} were expected"
            return self._corrupt(attempt, text)
        if not self._links[writer] and not grant.all_declared():
            return self._corrupt(attempt, "blocks were committed that were never pushed")
        return self._handoff_if_complete(attempt)

    def stopped(
        self, writer: WriterId, ref: GrantRef, reason: int | None = None, message: str = ""
    ) -> list[ReceiverAction]:
        """The writer's word that no further write of this grant comes."""
        attempt = self._book.find(writer, ref)
        if attempt is None or attempt.phase is Phase.COMMITTED:
            return []
        if attempt.phase is Phase.QUARANTINED:
            return self._end_quarantine(attempt)
        if reason is None or reason == FailureReason.FAILURE_REASON_DRAINING:
            # The gateway hears it from us, as our own word: it is the writer that leaves, not this worker.
            reason = FailureReason.FAILURE_REASON_PEER_LOST
        self._book.end(attempt)
        return [Fail(attempt.key, reason, message or "the prefill worker stopped"), *self.blocks_freed()]

    # -- time and numbers

    def tick(self, now: float) -> list[ReceiverAction]:
        """Escalate what has waited too long. Waits are counted from the first tick that sees them."""
        self._now = now
        actions: list[ReceiverAction] = []
        for attempt in self._book.in_phase(Phase.ASKED_BEFORE_ATTACH):
            if self._waited(attempt) >= self._patience.early_ask_s:
                reason = FailureReason.FAILURE_REASON_PEER_LOST
                actions += self._deny(attempt, reason, "the gateway did not attach this attempt")
        for attempt in self._book.in_phase(Phase.COMMITTED):
            # Nothing can be written by mistake later: only what names an open grant is copied.
            if self._waited(attempt) >= self._patience.arriving_s:
                actions += self._corrupt(attempt, "blocks that were committed did not arrive")
        overdue: dict[WriterId, None] = {}
        for attempt in self._book.table:
            if attempt.phase is Phase.QUARANTINED and self._waited(attempt) >= self._patience.stopping_s:
                overdue[attempt.asker] = None
        actions += [FenceWriter(writer, "it does not stop writing an aborted grant") for writer in overdue]
        return actions

    def holds_unproven(self, writer: WriterId) -> bool:
        """Whether blocks are out of use only because this writer might still write to them."""
        return bool(self._book.quarantined_by(writer))

    @property
    def num_grants(self) -> int:
        """Those that are being filled; what is in quarantine is none of them."""
        return self._book.num_grants

    def stats(self) -> ReceiverStats:
        """The numbers of this moment."""
        return self._book.stats(self._now)

    def granted(self) -> list[tuple[WriterId, Grant]]:
        """Every grant that a writer may still write to, quarantined ones included. For checks."""
        return [(a.asker, a.grant) for a in self._book.table if a.grant is not None]

    # -- transitions

    def _wait(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        self._book.wait(attempt)
        blocks = self._credit.blocks(attempt.wanted)
        if blocks > self._pool.total:
            text = f"{blocks} blocks are needed, the pool has {self._pool.total}"
            return self._deny(attempt, FailureReason.FAILURE_REASON_EXCEEDS_KV_CAPACITY, text)
        return self.blocks_freed()

    def _handoff_if_complete(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        grant, writer = attempt.held, attempt.asker
        in_place = self._links[writer]
        if not in_place:
            if not grant.all_received():
                return []
            if grant.contradicted():
                return self._corrupt(attempt, "a block differs from what was pushed")
        self._book.give_away(attempt)
        cached_tokens = self._credit.tokens(grant.cached_blocks)
        done = Handoff(
            writer,
            grant.ref,
            grant.block_ids,
            cached_tokens,
            grant.num_tokens,
            grant.first_tokens,
            in_place,
            grant.note,
        )
        return [done]

    def _deny(self, attempt: ReceivingAttempt, reason: int, message: str) -> list[ReceiverAction]:
        writer = attempt.asker
        return [SendDenied(writer, attempt.key, reason, message), *self._fail(attempt, reason, message)]

    def _fail(self, attempt: ReceivingAttempt, reason: int, message: str) -> list[ReceiverAction]:
        """End the attempt from our side, whatever its phase, and say so if anybody here expects it."""
        if attempt.phase is Phase.GRANTED:
            self._book.quarantine(attempt)
        elif attempt.phase is Phase.COMMITTED:
            self._book.end(attempt)
        else:
            self._book.forget(attempt)
        return [Fail(attempt.key, reason, message)] if attempt.expected is not None else []

    def _corrupt(self, attempt: ReceivingAttempt, message: str) -> list[ReceiverAction]:
        """What was written cannot be used. A writer that did not promise to stop is asked to."""
        actions: list[ReceiverAction] = []
        if attempt.phase is Phase.GRANTED:
            actions.append(SendAbort(attempt.asker, attempt.held.ref))
        actions += self._fail(attempt, FailureReason.FAILURE_REASON_KV_TRANSFER_FAILED, message)
        return actions + self.blocks_freed()

    def _give_up(self, attempt: ReceivingAttempt, message: str) -> list[ReceiverAction]:
        """Nobody here wants the attempt any more: no Fail, but its writer is told."""
        actions: list[ReceiverAction] = []
        if attempt.phase is Phase.GRANTED:
            actions.append(SendAbort(attempt.asker, attempt.held.ref))
        elif attempt.phase in (Phase.ASKED_BEFORE_ATTACH, Phase.WAITING):
            actions.append(SendDenied(attempt.asker, attempt.key, None, message))
        self._fail(attempt, FailureReason.FAILURE_REASON_UNSPECIFIED, message)
        return actions + self.blocks_freed()

    def _end_quarantine(self, attempt: ReceivingAttempt) -> list[ReceiverAction]:
        self._book.end(attempt)
        return self.blocks_freed()

    def _waited(self, attempt: ReceivingAttempt) -> float:
        if attempt.since is None:
            attempt.since = self._now
        return self._now - attempt.since
