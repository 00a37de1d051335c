"""Single transitions of the decode side that the random walks reach but do not name."""

from __future__ import annotations

import pytest

from diptych.engine.kv.block_pool import BlockPool
from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.messages import (
    Fail,
    FenceWriter,
    Handoff,
    PendingTransfer,
    SendAbort,
    SendDenied,
    SendGrant,
    WriterId,
)
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.protocol.transfer_table import EscalationTimeouts

WRITER = WriterId("w", 1)
KEY = ("r", 1)


def granted(
    in_place: bool, num_tokens: int = 6, reserve: int | None = None
) -> tuple[Receiver, BlockPool, SendGrant]:
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0)
    receiver.link_up(WRITER, in_place=in_place)
    receiver.expect(PendingTransfer(KEY, num_tokens, [], reserve))
    (grant,) = receiver.ask(WRITER, KEY)
    assert isinstance(grant, SendGrant)
    return receiver, pool, grant


def test_commit_in_place_hands_off_at_once():
    receiver, pool, grant = granted(in_place=True)
    assert receiver.commit(WRITER, grant.ref, 6, (9,), "note") == [
        Handoff(WRITER, grant.ref, [0, 1, 2], 0, 6, (9,), True, "note")
    ]
    assert pool.available() == 5


def test_commit_waits_for_blocks_in_flight():
    receiver, _, grant = granted(in_place=False)
    receiver.pushed(WRITER, grant.ref, 0, 3, [b"0", b"1", b"2"])
    assert receiver.commit(WRITER, grant.ref, 6, (9,)) == []
    assert receiver.arrived(WRITER, grant.ref, 2, [b"2"]) == []
    assert receiver.arrived(WRITER, grant.ref, 2, [b"2", b"3"]) == [], "more than was granted"
    (done,) = receiver.arrived(WRITER, grant.ref, 0, [b"0", b"1"])
    assert isinstance(done, Handoff)


def test_commit_fails_on_a_digest_mismatch():
    receiver, pool, grant = granted(in_place=False)
    for index in range(3):
        receiver.arrived(WRITER, grant.ref, index, [b"x"])
    receiver.pushed(WRITER, grant.ref, 0, 3, [b"x", b"y", b"x"])
    (failed,) = receiver.commit(WRITER, grant.ref, 6, (9,))
    assert isinstance(failed, Fail)
    assert failed.reason == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    assert pool.available() == 8, "the writer promised to stop: nothing is left in quarantine"


def test_tick_fails_a_commit_whose_blocks_do_not_arrive():
    """A damaged bit in a frame's header makes it name another grant; the client may have no deadline."""
    receiver, pool, grant = granted(in_place=False)
    receiver.pushed(WRITER, grant.ref, 0, 3, [b"0", b"1", b"2"])
    receiver.arrived(WRITER, grant.ref, 0, [b"0"])
    receiver.commit(WRITER, grant.ref, 6, (9,))
    assert receiver.tick(10.0) == []
    receiver.arrived(WRITER, grant.ref, 1, [b"1"])
    assert receiver.tick(14.0) == []
    assert receiver.tick(18.9) == [], "counted from the last block that came"
    (failed,) = receiver.tick(19.0)
    assert isinstance(failed, Fail)
    assert failed.reason == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    assert pool.available() == 8
    late = receiver.destinations(WRITER, grant.ref, range(2, 3))
    assert late is None, "a copy that comes later has nowhere to go"


@pytest.mark.parametrize("pushes", [[], [(0, 2)], [(1, 2)]])
def test_commit_without_all_pushes_fails(pushes):
    receiver, pool, grant = granted(in_place=False)
    for first, count in pushes:
        receiver.pushed(WRITER, grant.ref, first, count, [b"d"] * count)
    (failed,) = receiver.commit(WRITER, grant.ref, 6, (9,))
    assert isinstance(failed, Fail)
    assert pool.available() == 8


@pytest.mark.parametrize(("first", "count", "digests"), [(0, 4, 4), (3, 1, 1), (0, 2, 1)])
def test_pushed_outside_the_table_revokes_the_grant(first, count, digests):
    receiver, pool, grant = granted(in_place=False)
    abort, failed = receiver.pushed(WRITER, grant.ref, first, count, [b"d"] * digests)
    assert abort == SendAbort(WRITER, grant.ref)
    assert isinstance(failed, Fail)
    assert pool.quarantined() == 3


def test_commit_of_a_cancelled_grant_ends_its_quarantine():
    receiver, pool, grant = granted(in_place=True)
    assert receiver.cancel(KEY) == [SendAbort(WRITER, grant.ref)]
    assert pool.quarantined() == 3
    assert receiver.commit(WRITER, grant.ref, 6, (9,)) == []
    assert pool.available() == 8


def test_destinations_of_stale_data_are_none():
    receiver, _, grant = granted(in_place=False)
    assert receiver.destinations(WRITER, grant.ref, range(1, 3)) == list(grant.block_ids[1:3])
    assert receiver.destinations(WRITER, grant.ref, range(2, 4)) is None, "one of them was not granted"
    assert receiver.destinations(WriterId("w", 2), grant.ref, range(1)) is None
    assert receiver.destinations(WRITER, grant.ref._replace(generation=99), range(1)) is None
    receiver.cancel(KEY)
    assert receiver.destinations(WRITER, grant.ref, range(2, 3)) is None


def test_grant_holds_a_reserve_that_is_not_sent():
    receiver, pool, grant = granted(in_place=True, num_tokens=3, reserve=5)
    assert len(grant.block_ids) == 2
    assert pool.available() == 3
    (done,) = receiver.commit(WRITER, grant.ref, 3, (9,))
    assert isinstance(done, Handoff)
    assert len(done.block_ids) == 5


@pytest.mark.parametrize(
    ("sequences", "running", "held", "is_granted"),
    [
        (1, 0, 5, True),  # three blocks, and no other sequence
        (4, 0, 2, True),  # a block of its own for each of the three others
        (4, 0, 3, False),
        (4, 2, 0, True),
        (4, 2, 1, False),
        (9, 0, 0, True),  # more than that never comes: it is alone
        (9, 1, 1, False),
    ],
)
def test_ask_of_several_sequences_waits_for_a_block_each(sequences, running, held, is_granted):
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: running)
    pool.allocate(held)
    receiver.link_up(WRITER, in_place=True)
    receiver.expect(PendingTransfer(KEY, 6, [], None, sequences))
    assert bool(receiver.ask(WRITER, KEY)) == is_granted


def test_cancel_unpins_the_cached_prefix_at_once():
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0)
    (block,) = pool.allocate(1)
    pool.insert(block, b"k", b"")
    pool.release([block])
    receiver.link_up(WRITER, in_place=True)
    receiver.expect(PendingTransfer(KEY, 6, [b"k"]))
    (grant,) = receiver.ask(WRITER, KEY)
    assert isinstance(grant, SendGrant)
    assert grant.cached_tokens == 2
    assert pool.references(block) == 1
    receiver.cancel(KEY)
    assert pool.references(block) == 0
    assert pool.quarantined() == 2


def test_blocks_freed_serves_first_come_first():
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0)
    held = pool.allocate(4)
    receiver.link_up(WRITER, in_place=True)
    for name, tokens in (("large", 12), ("small", 2)):
        receiver.expect(PendingTransfer((name, 1), tokens, []))
        assert receiver.ask(WRITER, (name, 1)) == []
    pool.release(held)
    granted_now = receiver.blocks_freed()
    assert [a.ref.key[0] for a in granted_now if isinstance(a, SendGrant)] == ["large", "small"]


def test_blocks_freed_serves_a_higher_priority_first():
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0)
    held = pool.allocate(8)
    receiver.link_up(WRITER, in_place=True)
    for name, priority in (("first", 0), ("urgent", 3), ("second", 0), ("low", -1)):
        receiver.expect(PendingTransfer((name, 1), 4, [], priority=priority))
        assert receiver.ask(WRITER, (name, 1)) == []
    pool.release(held)
    granted_now = [a.ref.key[0] for a in receiver.blocks_freed() if isinstance(a, SendGrant)]
    assert granted_now == ["urgent", "first", "second", "low"]


def test_ask_beyond_the_pool_is_denied_at_once():
    """It would stand before all others in the queue, for ever."""
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0)
    receiver.link_up(WRITER, in_place=True)
    receiver.expect(PendingTransfer(KEY, 17, []))
    denied, failed = receiver.ask(WRITER, KEY)
    assert isinstance(denied, SendDenied)
    assert isinstance(failed, Fail)
    assert failed.reason == work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY
    receiver.expect(PendingTransfer(("r", 2), 16, []))
    (grant,) = receiver.ask(WRITER, ("r", 2))
    assert isinstance(grant, SendGrant)


def test_tick_escalates_waits_and_frees_nothing():
    pool = BlockPool(8)
    receiver = Receiver(pool, 2, lambda: 0, EscalationTimeouts(attach_s=1.0, stop_s=30.0))
    receiver.link_up(WRITER, in_place=True)
    receiver.ask(WRITER, ("early", 1))
    receiver.expect(PendingTransfer(KEY, 6, []))
    receiver.ask(WRITER, KEY)
    receiver.cancel(KEY)
    assert receiver.tick(100.0) == []
    assert receiver.tick(100.9) == []
    (denied,) = receiver.tick(101.0)
    assert isinstance(denied, SendDenied)
    assert receiver.tick(129.0) == []
    assert receiver.stats().quarantine_age_s == 29.0
    (fence,) = receiver.tick(130.0)
    assert isinstance(fence, FenceWriter)
    assert pool.quarantined() == 3
    receiver.writer_dead(WRITER, "")
    assert pool.available() == 8


def test_second_attach_or_ask_is_rejected():
    receiver, _, _ = granted(in_place=True)
    with pytest.raises(ValueError, match="already"):
        receiver.expect(PendingTransfer(KEY, 6, []))
    (denied,) = receiver.ask(WRITER, KEY)
    assert isinstance(denied, SendDenied)


@pytest.mark.parametrize("reason", [None, work_pb2.FAILURE_REASON_DRAINING])
def test_stopped_writer_is_reported_as_peer_lost(reason):
    """The gateway takes the decode worker for the sender and would avoid it, perhaps the only one."""
    receiver, pool, grant = granted(in_place=True)
    (failed,) = receiver.stopped(WRITER, grant.ref, reason, "it drains")
    assert failed == Fail(KEY, work_pb2.FAILURE_REASON_PEER_LOST, "it drains")
    assert pool.available() == 8


def test_withdraw_is_reported_as_peer_lost():
    pool = BlockPool(2)
    receiver = Receiver(pool, 2, lambda: 0)
    receiver.link_up(WRITER, in_place=True)
    held = pool.allocate(2)
    receiver.expect(PendingTransfer(KEY, 4, []))
    assert receiver.ask(WRITER, KEY) == []
    (failed,) = receiver.withdraw(WRITER, KEY)
    assert failed.reason == work_pb2.FAILURE_REASON_PEER_LOST
    pool.release(held)
