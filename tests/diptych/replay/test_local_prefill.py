"""Prompts that decode workers of a replay compute: by the gateway's rule, in chunks, none lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from decode_worker.local_schedule import LocalBounds
from diptych.bench.datasets.traces import TraceRow
from diptych.replay.fleet import ReplayFleet, ServiceGoal
from diptych.replay.local_choice import LocalChoice
from diptych.replay.replay import Replay
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Routing
from diptych.replay.step_times import StepTimes
from tests.diptych.replay.fleets import FLEET


@dataclass(frozen=True)
class Cores:
    """Times as two cores have them."""

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        return 0.012 + 0.00035 * new_tokens

    def step_s(self, batch: float, context: float) -> float:
        return 0.004 + 0.0006 * batch


PAIR = replace(FLEET, prefill=1, decode=1, local=LocalBounds())
CORES = replace(PAIR, times=StepTimes(Cores(), handoff_s=0.006))


def replayed(fleet: ReplayFleet, requests: Sequence[TraceRow]) -> ReplayResult:
    replay = Replay(fleet, ServiceGoal())
    result = replay.run(requests)
    replay.invariants()
    return result


def test_lone_short_prompt_is_computed_by_its_decode_worker() -> None:
    result = replayed(PAIR, [TraceRow(0.0, 100, 11)])
    assert result.local == 1
    # No handoff, and the prompt in one step of its own.
    assert result.ttft.percentile(50) == pytest.approx(0.001 + 0.002, rel=0.01)
    far = replayed(replace(PAIR, local=None), [TraceRow(0.0, 100, 11)])
    assert far.ttft.percentile(50) == pytest.approx(0.001 + 0.002 + 0.003, rel=0.01)


def test_longer_prompts_and_other_routings_take_a_prefill_worker() -> None:
    assert replayed(PAIR, [TraceRow(0.0, 257, 11)]).local == 0
    assert replayed(replace(PAIR, routing=Routing.RANDOM), [TraceRow(0.0, 100, 11)]).local == 0


def test_short_prompt_passes_a_long_one() -> None:
    requests = [TraceRow(0.0, 8000, 2), TraceRow(0.05, 200, 2)]
    local, never = replayed(PAIR, requests), replayed(replace(PAIR, local=None), requests)
    assert local.local == 1
    assert (local.ttft.percentile(1) or 1.0) < 0.02
    assert (never.ttft.percentile(1) or 0.0) > 0.1


def test_chunks_beside_a_stream_take_their_time_from_it() -> None:
    # The long prompt keeps the prefill worker busy for a second.
    requests = [TraceRow(0.0, 1000, 200), TraceRow(0.4, 3000, 1)]
    prompts = [TraceRow(0.5 + 0.05 * at, 200, 1) for at in range(6)]
    local = replayed(CORES, [*requests, *prompts])
    alone = replayed(CORES, requests)
    assert (local.local, alone.local) == (6, 0)
    added_s = (local.tpot.percentile(50) or 0.0) - (alone.tpot.percentile(50) or 0.0)
    assert added_s == pytest.approx(6 * 200 * 0.00035 / 199, rel=0.05)


def test_nothing_is_lost_where_blocks_run_short() -> None:
    # Admission expects answers as long as those before; these grow all at once.
    requests = [TraceRow(0.002 * at, 40 + at % 200, 1200) for at in range(60)]
    result = replayed(replace(CORES, blocks=300), requests)
    assert result.local > 4
    assert result.preempted > 0
    assert result.completed == 60


def test_runs_of_steps_equal_steps_and_a_replay_is_the_same_each_time() -> None:
    chance = random.Random(0)
    arrivals = itertools.accumulate(chance.expovariate(5) for _ in range(150))
    requests = [TraceRow(at, chance.randint(20, 400), chance.randint(1, 60)) for at in arrivals]
    runs, again = replayed(CORES, requests).as_json(), replayed(CORES, requests).as_json()
    steps = replayed(replace(CORES, most_steps=1), requests).as_json()
    assert runs == again
    assert 20 < runs["local_prefills"] < 150
    for name in ("completed", "local_prefills", "duration_s", "p50_ttft_ms", "p50_tpot_ms"):
        assert runs[name] == pytest.approx(steps[name], rel=0.05), name


def test_prompt_whose_prefix_was_evicted_is_sent_to_a_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is told of a hit that the pool has lost: its decode worker answers that too many are new."""
    real = LocalChoice.choose

    def hopeful(self: LocalChoice, request, remote, decode, waiting_tokens):  # type: ignore[no-untyped-def]
        cached = [replace(one, cached_blocks=(request.tokens - 1) // one.block_size) for one in decode]
        return real(self, request, remote, cached, waiting_tokens)

    monkeypatch.setattr(LocalChoice, "choose", hopeful)
    result = replayed(PAIR, [TraceRow(0.0, 1000, 5), TraceRow(1.0, 100, 5)])
    assert (result.local, result.completed) == (1, 2)
