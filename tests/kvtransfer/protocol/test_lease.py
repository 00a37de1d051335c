"""A peer is fenced for its own silence, never for ours."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.lease import Lease, LeasePhase, LeaseTimes, Verdict

TIMES = LeaseTimes()


def ticks(lease: Lease, start: float, end: float) -> list[tuple[float, Verdict]]:
    """Tick every interval; what was found, and when."""
    found, now = [], start
    while now <= end:
        verdict = lease.tick(now)
        if verdict is not Verdict.NONE:
            found.append((now, verdict))
        now = round(now + TIMES.interval_s, 3)
    return found


def test_silence_escalates_once():
    assert ticks(Lease(0.0, TIMES), 0.25, 9.0) == [(1.0, Verdict.SUSPECT), (2.0, Verdict.EXPIRED)]


def test_beats_keep_it_alive_and_clear_suspicion():
    lease = Lease(0.0, TIMES)
    assert ticks(lease, 0.25, 1.5) == [(1.0, Verdict.SUSPECT)]
    lease.on_heartbeat(1.6, 1, False)
    assert lease.phase is LeasePhase.ALIVE
    assert ticks(lease, 1.75, 2.5) == []


def test_our_own_stall_is_not_the_peers_silence():
    lease = Lease(0.0, TIMES)
    lease.tick(0.25)
    assert lease.tick(60.0) is Verdict.NONE
    lease.on_message(60.01)
    assert ticks(lease, 60.25, 60.75) == []
    assert [verdict for _, verdict in ticks(lease, 61.0, 65.0)] == [Verdict.SUSPECT, Verdict.EXPIRED]


def test_a_broken_stream_has_a_grace():
    lease = Lease(0.0, TIMES)
    lease.tick(0.25)
    lease.link_lost(0.3)
    assert ticks(lease, 0.5, 1.25) == []
    lease.link_up(1.3)
    assert lease.phase is LeasePhase.ALIVE
    lease.link_lost(1.4)
    assert ticks(lease, 1.5, 3.0) == [(2.5, Verdict.EXPIRED)]


def test_a_busy_engine_that_does_not_move_is_gone():
    lease = Lease(0.0, TIMES)
    now = 0.0
    while now < TIMES.stuck_after_s:
        assert lease.tick(now) is Verdict.NONE
        lease.on_heartbeat(now, 5, True)
        now += TIMES.interval_s
    assert lease.tick(now + TIMES.interval_s) is Verdict.EXPIRED


def test_an_idle_engine_need_not_move():
    lease = Lease(0.0, TIMES)
    now = 0.0
    while now < 2 * TIMES.stuck_after_s:
        assert lease.tick(now) is Verdict.NONE
        lease.on_heartbeat(now, 5, False)
        now += TIMES.interval_s


def test_who_was_fenced_stays_fenced():
    lease = Lease(0.0, TIMES)
    lease.fence()
    lease.on_message(0.1)
    lease.link_lost(0.2)
    lease.link_up(0.3)
    assert lease.phase is LeasePhase.FENCED
    assert ticks(lease, 0.5, 9.0) == []


def test_there_is_one_way_back():
    lease = Lease(0.0, TIMES)
    lease.fence()
    with pytest.raises(RuntimeError, match="fenced to alive"):
        lease._move(LeasePhase.ALIVE)


def test_a_step_far_past_its_predicted_end_is_as_bad_as_silence():
    lease, now, found = Lease(0.0, TIMES), 0.0, []
    while not found and now < 60:
        now += TIMES.interval_s
        lease.on_heartbeat(now, 1, True, late_s=max(now - 5.0, 0.0))
        if (verdict := lease.tick(now)) is not Verdict.NONE:
            found.append((now, verdict))
    assert found == [(5.0 + TIMES.late_after_s, Verdict.EXPIRED)]
