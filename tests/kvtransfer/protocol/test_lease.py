"""Leases and clocks: a peer is fenced for its own silence, never for a stall of this process."""

from __future__ import annotations

import pytest

from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.lease import Lease, LeasePhase, LeaseTimes, RunningTime, Verdict
from kvtransfer.protocol.messages import FenceWriter, PendingTransfer, SendAbort, SendGrant, WriterId
from kvtransfer.protocol.receiver import Receiver

TIMES = LeaseTimes()


def ticks(lease: Lease, start: float, end: float) -> list[tuple[float, Verdict]]:
    """Tick every interval; return the verdicts with their times."""
    found, now = [], start
    while now <= end:
        verdict = lease.tick(now)
        if verdict is not Verdict.NONE:
            found.append((now, verdict))
        now = round(now + TIMES.interval_s, 3)
    return found


def test_tick_escalates_silence_once():
    assert ticks(Lease(0.0, TIMES), 0.25, 9.0) == [(1.0, Verdict.SUSPECT), (2.0, Verdict.EXPIRED)]


def test_heartbeat_clears_suspicion():
    lease = Lease(0.0, TIMES)
    assert ticks(lease, 0.25, 1.5) == [(1.0, Verdict.SUSPECT)]
    lease.on_heartbeat(1.6, 1, False)
    assert lease.phase is LeasePhase.ALIVE
    assert ticks(lease, 1.75, 2.5) == []


def test_tick_discounts_a_stall_of_this_process():
    lease = Lease(0.0, TIMES)
    lease.tick(0.25)
    assert lease.tick(60.0) is Verdict.NONE
    lease.on_message(60.01)
    assert ticks(lease, 60.25, 60.75) == []
    assert [verdict for _, verdict in ticks(lease, 61.0, 65.0)] == [Verdict.SUSPECT, Verdict.EXPIRED]


@pytest.mark.parametrize(("late_s", "fenced_after_s"), [(0.005, 2.0), (0.05, 3.0), (0.2, 5.0), (3.0, 8.0)])
def test_patience_with_silence_grows_with_the_lateness_of_ticks(late_s: float, fenced_after_s: float):
    """A machine that keeps this process waiting keeps the peer waiting, too; the bound holds all the same."""
    lease, now = Lease(0.0, TIMES), 0.0
    for step in range(80):
        now += TIMES.interval_s + late_s
        lease.on_heartbeat(now, step, True)
        assert lease.tick(now) is Verdict.NONE
    silent_since = lost = now
    while lease.tick(now) is not Verdict.EXPIRED:
        lost = now
        now += TIMES.interval_s + late_s
        assert now - silent_since < 120
    stalls = late_s > TIMES.interval_s  # these are taken off the silence
    assert stalls or lost - silent_since >= fenced_after_s - 0.5
    assert stalls or now - silent_since <= 4 * TIMES.fence_after_s + TIMES.interval_s + late_s


def test_patience_returns_when_the_machine_is_calm_again():
    lease, now = Lease(0.0, TIMES), 0.0
    for step in range(200):
        now += TIMES.interval_s + (0.2 if step < 40 else 0.0)
        lease.on_heartbeat(now, step, True)
        lease.tick(now)
    (_, suspect), (at, expired) = ticks(lease, now + 0.25, now + 9.0)
    assert (suspect, expired) == (Verdict.SUSPECT, Verdict.EXPIRED)
    assert at - now <= 2.5


def test_tick_grants_a_broken_stream_the_relink_grace():
    lease = Lease(0.0, TIMES)
    lease.tick(0.25)
    lease.link_lost(0.3)
    assert ticks(lease, 0.5, 1.25) == []
    lease.link_up(1.3)
    assert lease.phase is LeasePhase.ALIVE
    lease.link_lost(1.4)
    assert ticks(lease, 1.5, 3.0) == [(2.5, Verdict.EXPIRED)]


def test_tick_expires_a_busy_engine_without_progress():
    lease = Lease(0.0, TIMES)
    now = 0.0
    while now < TIMES.stuck_after_s:
        assert lease.tick(now) is Verdict.NONE
        lease.on_heartbeat(now, 5, True)
        now += TIMES.interval_s
    assert lease.tick(now + TIMES.interval_s) is Verdict.EXPIRED


def test_tick_spares_an_idle_engine_without_progress():
    lease = Lease(0.0, TIMES)
    now = 0.0
    while now < 2 * TIMES.stuck_after_s:
        assert lease.tick(now) is Verdict.NONE
        lease.on_heartbeat(now, 5, False)
        now += TIMES.interval_s


def test_fenced_lease_stays_fenced():
    lease = Lease(0.0, TIMES)
    lease.fence()
    lease.on_message(0.1)
    lease.link_lost(0.2)
    lease.link_up(0.3)
    assert lease.phase is LeasePhase.FENCED
    assert ticks(lease, 0.5, 9.0) == []


def test_move_out_of_fenced_raises():
    lease = Lease(0.0, TIMES)
    lease.fence()
    with pytest.raises(RuntimeError, match="fenced to alive"):
        lease._move(LeasePhase.ALIVE)


def test_tick_expires_a_step_far_past_its_predicted_end():
    lease, now, found = Lease(0.0, TIMES), 0.0, []
    while not found and now < 60:
        now += TIMES.interval_s
        lease.on_heartbeat(now, 1, True, late_s=max(now - 5.0, 0.0))
        if (verdict := lease.tick(now)) is not Verdict.NONE:
            found.append((now, verdict))
    assert found == [(5.0 + TIMES.late_after_s, Verdict.EXPIRED)]


def test_running_time_stands_still_during_a_stall() -> None:
    time = RunningTime(0.5)
    assert [time.at(now) for now in (100.0, 100.25, 100.5, 160.0, 160.25)] == [0.0, 0.25, 0.5, 1.0, 1.25]


def test_running_time_defers_the_fence_after_a_stall() -> None:
    time, writer, key = RunningTime(0.5), WriterId("p0", 1), ("r", 1)
    receiver = Receiver(BlockPool(8), 4, lambda: 0)
    receiver.link_up(writer, in_place=True)
    receiver.expect(PendingTransfer(key, 8, []))
    (grant,) = receiver.ask(writer, key)
    assert isinstance(grant, SendGrant)
    assert receiver.cancel(key) == [SendAbort(writer, grant.ref)]
    done = [action for now in (100.0, 100.25, 131.0) for action in receiver.tick(time.at(now))]
    assert done == []  # the writer's answer may lie unread
    later = [action for n in range(125) for action in receiver.tick(time.at(131.0 + 0.25 * n))]
    assert any(isinstance(action, FenceWriter) for action in later)
