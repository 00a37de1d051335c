"""Replays: nothing is lost, runs of steps equal steps, and routing by cost finds what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from diptych.bench.datasets.traces import TraceRow
from diptych.replay.decode_worker import SimulatedDecodeWorker
from diptych.replay.fleet import ReplayFleet, ServiceGoal
from diptych.replay.replay import Replay
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Routing
from tests.diptych.replay.fleets import COPYING, FLEET, conversations

NO_GOAL = ServiceGoal()
GOAL = ServiceGoal(ttft_s=0.5, tpot_s=0.03)


def replayed(fleet: ReplayFleet, requests: Sequence[TraceRow], goal: ServiceGoal = NO_GOAL) -> ReplayResult:
    replay = Replay(fleet, goal)
    result = replay.run(requests)
    replay.invariants()
    return result


def test_lone_request_takes_its_prompt_its_handoff_and_its_steps() -> None:
    result = replayed(replace(FLEET, prefill=1, decode=1), [TraceRow(0.0, 1000, 11)])
    first_s = 0.001 + 0.02 + 0.003
    steps_s = sum(0.0051 + 0.0000001 * (1000 + step) for step in range(10))
    assert result.ttft.percentile(50) == pytest.approx(first_s, rel=0.006)
    assert result.last_s == pytest.approx(first_s + steps_s)
    assert (result.completed, result.output_tokens) == (1, 11)


def test_prompt_beside_decode_steps_takes_longer_where_both_share_a_machine() -> None:
    shared = replace(FLEET, prefill=1, decode=1, times=replace(FLEET.times, prompts_beside=2.0))
    requests = [TraceRow(0.0, 1000, 300), TraceRow(0.5, 2000, 1), TraceRow(9.0, 2000, 1)]
    apart, beside = replayed(replace(shared, times=FLEET.times), requests), replayed(shared, requests)
    assert beside.ttft.percentile(100) == pytest.approx(2 * (0.001 + 0.04) + 0.003, rel=0.02)
    assert beside.ttft.percentile(60) == pytest.approx(apart.ttft.percentile(60), rel=0.01)


def test_prompt_is_as_fast_as_alone_from_the_moment_that_decode_steps_end() -> None:
    shared = replace(FLEET, prefill=1, decode=1, times=replace(FLEET.times, prompts_beside=2.0))
    alone = replayed(shared, [TraceRow(0.0, 1000, 41)])
    late_s = alone.last_s - 0.02
    second = replayed(shared, [TraceRow(0.0, 1000, 41), TraceRow(late_s, 2000, 1)])
    assert second.ttft.percentile(100) == pytest.approx(0.01 + 0.001 + 0.04 + 0.003, rel=0.03)


def test_decode_steps_beside_a_prompt_take_longer_and_pause_while_more_wait() -> None:
    apart = replace(FLEET, prefill=1, decode=1)
    shared = replace(apart, times=replace(FLEET.times, steps_beside=2.0))
    stream, one = TraceRow(0.0, 1000, 300), TraceRow(0.5, 2000, 1)
    plain, slow = replayed(apart, [stream, one]), replayed(shared, [stream, one])
    assert slow.last_s - plain.last_s == pytest.approx(0.041 / 2, abs=0.006)
    many = [stream, *(replace(one, input_len=2048) for _ in range(60))]
    queued, paced = replayed(apart, many), replayed(shared, many)
    # Sixty steps of prompts: steps take twice as long, and begin up to three times as seldom.
    assert paced.itl.percentile(100) == pytest.approx(6 * 0.0052, rel=0.03)
    assert queued.itl.percentile(100) == pytest.approx(0.0052, rel=0.03)
    assert paced.last_s > queued.last_s + 0.3


def test_machines_are_shared_by_pairs_only() -> None:
    times = replace(FLEET.times, prompts_beside=2.0, steps_beside=2.0)
    fleet = replace(FLEET, times=times, prefill=2, decode=1)
    replay = Replay(fleet, NO_GOAL)
    assert [cores is None for cores in replay.cores] == [False, True]


def compare_runs_with_steps(fleet: ReplayFleet, requests: Sequence[TraceRow]) -> ReplayResult:
    """Replay with the schedule asked before each step, and with runs of steps: all figures are the same."""
    runs = replayed(fleet, requests, GOAL)
    steps = replayed(replace(fleet, most_steps=1), requests, GOAL)
    one, other = runs.as_json(), steps.as_json()
    for name in ("completed", "refused", "preempted", "hit_rate"):
        assert one[name] == pytest.approx(other[name], rel=0.02, abs=0.01), name
    for name in ("duration_s", "attainment", "mean_batch", "p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms"):
        assert one[name] == pytest.approx(other[name], rel=0.02), name
    return runs


def test_runs_of_steps_equal_steps() -> None:
    compare_runs_with_steps(FLEET, list(conversations(400, rate=20)))


def test_runs_of_steps_equal_steps_where_blocks_run_short() -> None:
    scarce = replace(FLEET, prefill=1, decode=1, blocks=700)
    # Admission expects answers as long as those before; these grow all at once.
    requests = [TraceRow(0.0, 100 + number, 1200) for number in range(24)]
    assert compare_runs_with_steps(scarce, requests).preempted > 0


def test_streams_that_join_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without an end of the run, a stream waits for the next one to finish."""
    monkeypatch.setattr(SimulatedDecodeWorker, "_shorten", lambda worker, steps: None)
    with pytest.raises(AssertionError):
        compare_runs_with_steps(FLEET, list(conversations(400, rate=20)))


def test_full_batches_wait_in_order() -> None:
    small = replace(FLEET, max_batch=3)
    compare_runs_with_steps(small, list(conversations(200, rate=20)))


def test_overload_is_refused_and_counted() -> None:
    slow = replace(FLEET, prefill=1, decode=1)
    result = replayed(slow, list(conversations(3000, rate=300)), GOAL)
    assert result.refused > 0
    assert result.completed + result.refused == 3000
    assert result.attainment < 0.5


def test_goodput_is_a_share_of_the_rate_of_arrivals() -> None:
    requests = [TraceRow(0.1 * at, 100, 200) for at in range(101)]
    result = replayed(FLEET, requests, ServiceGoal(ttft_s=0.5))
    assert result.goodput == pytest.approx(101 / 10.0)
    assert result.goodput_per_worker == pytest.approx(101 / 40.0)
    assert result.last_s > 10.5


def test_request_longer_than_a_pool_is_refused() -> None:
    result = replayed(FLEET, [TraceRow(0.0, 30_000, 5), TraceRow(1.0, 10, 5)])
    assert (result.too_long, result.completed) == (1, 1)


@pytest.mark.parametrize("fleet", [FLEET, COPYING], ids=["in place", "copying"])
def test_routing_by_cost_finds_what_an_oracle_finds(fleet: ReplayFleet) -> None:
    requests = list(conversations(1500, rate=20))
    cost = replayed(fleet, requests)
    oracle = replayed(replace(fleet, routing=Routing.LONGEST_PREFIX), requests)
    blind = replayed(replace(fleet, routing=Routing.RANDOM), requests)
    assert cost.hit_rate > 0.95 * oracle.hit_rate
    assert blind.hit_rate < 0.9 * oracle.hit_rate


def test_oracle_knows_more_than_a_late_index() -> None:
    requests = list(conversations(1500, rate=20))
    late = replayed(replace(COPYING, index_delay_s=20.0), requests)
    assert late.hit_rate < late.best_hit_rate
    assert late.hit_rate < replayed(COPYING, requests).hit_rate


def test_a_replay_is_the_same_each_time() -> None:
    requests = list(conversations(300, rate=30))
    assert replayed(COPYING, requests).as_json() == replayed(COPYING, requests).as_json()
