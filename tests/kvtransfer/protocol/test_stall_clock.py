"""What this process missed while it stood still is nobody else's fault."""

from __future__ import annotations

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.lease import RunningTime
from kvtransfer.protocol.messages import FenceWriter, PendingTransfer, SendAbort, SendGrant, WriterId
from kvtransfer.protocol.receiver import Receiver


def test_a_gap_counts_for_so_much_and_no_more() -> None:
    time = RunningTime(0.5)
    assert [time.at(now) for now in (100.0, 100.25, 100.5, 160.0, 160.25)] == [0.0, 0.25, 0.5, 1.0, 1.25]


def test_a_writer_is_not_fenced_for_our_own_stall() -> None:
    time, writer, key = RunningTime(0.5), WriterId("p0", 1), ("r", 1)
    receiver = Receiver(BlockPool(8), 4, lambda: 0)
    receiver.link_up(writer, in_place=True)
    receiver.expect(PendingTransfer(key, 8, []))
    (grant,) = receiver.ask(writer, key)
    assert isinstance(grant, SendGrant)
    assert receiver.cancel(key) == [SendAbort(writer, grant.ref)]
    done = [action for now in (100.0, 100.25, 131.0) for action in receiver.tick(time.at(now))]
    assert done == []  # its answer may lie unread
    later = [action for n in range(125) for action in receiver.tick(time.at(131.0 + 0.25 * n))]
    assert any(isinstance(action, FenceWriter) for action in later)
