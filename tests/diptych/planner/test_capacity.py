"""Waits beside textbook values and a simulated queue, and fleets that keep what was asked."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.planner.capacity import Demand, DoesNotFit, Fleet, Worker, mean_wait_s, size_fleet, worker_of
from diptych.planner.hardware import ACCELERATORS
from diptych.planner.measured_rates import Measured
from diptych.planner.model_costs import model_costs
from diptych.planner.model_shape import read_shape
from diptych.planner.money import ApiPrice, price_fleet
from diptych.planner.plan import Question, make_plan
from diptych.planner.rates import Roofline
from tests.diptych.planner.shapes import LLAMA_3_8B, LLAMA_3_70B, write_config
from tests.diptych.worker_process.both_workers import RECURRENT, SHAPE


def test_wait_of_one_worker_is_pollaczek_and_khinchines() -> None:
    """A queue M/D/1 waits rho S / (2 (1 - rho)) on average."""
    assert mean_wait_s(0.8, 1.0, 1) == pytest.approx(0.8 / (2 * 0.2))
    assert mean_wait_s(1.0, 1.0, 1) == math.inf
    assert mean_wait_s(0.0, 1.0, 1) == 0.0


def simulated_wait(rate: float, service: float, workers: int, arrivals: int = 60_000) -> float:
    """Return the mean wait of a queue that is played through."""
    rng, now, total = random.Random(7), 0.0, 0.0
    free = [0.0] * workers
    for _ in range(arrivals):
        now += rng.expovariate(rate)
        begin = max(now, heapq.heappop(free))
        total += begin - now
        heapq.heappush(free, begin + service)
    return total / arrivals


@pytest.mark.parametrize(("rate", "workers"), [(0.7, 1), (1.6, 2), (3.4, 4)])
def test_wait_is_near_that_of_a_simulated_queue(rate: float, workers: int) -> None:
    played = simulated_wait(rate, 1.0, workers)
    assert mean_wait_s(rate, 1.0, workers) == pytest.approx(played, rel=0.12)
    # Times that vary exponentially wait twice as long: the control.
    assert 2 * mean_wait_s(rate, 1.0, workers) != pytest.approx(played, rel=0.4)


@pytest.fixture
def fleet_of(tmp_path: Path) -> Callable[[Demand], Fleet]:
    costs = model_costs(read_shape(write_config(tmp_path, LLAMA_3_8B)))
    card = ACCELERATORS["h100"]

    def size(demand: Demand) -> Fleet:
        return size_fleet(demand, worker_of(costs, card.memory), Roofline(costs, card))

    return size


def test_streams_have_room_for_the_states_that_a_step_in_torch_holds() -> None:
    costs = model_costs(replace(RECURRENT, norm="layer"))
    assert costs.held_bytes == costs.state_bytes > 0
    assert worker_of(costs, 80e9).stream_bytes == 3 * costs.state_bytes
    changed_in_place = model_costs(RECURRENT)
    assert changed_in_place.held_bytes == 0
    assert worker_of(changed_in_place, 80e9).stream_bytes == 2 * costs.state_bytes
    assert model_costs(SHAPE).held_bytes == worker_of(model_costs(SHAPE), 80e9).stream_bytes == 0


@pytest.mark.parametrize(("held", "said"), [(1.0, True), (0.0, False)])
def test_a_plan_says_that_torch_is_slower_than_its_times(held: float, said: bool) -> None:
    made = make_plan(Question(SHAPE, ACCELERATORS["h100"], Demand(1.0, 100, 10)))
    advice = replace(made, costs=replace(made.costs, held_bytes=held)).advice
    assert any("(--bench)" in one for one in advice) == said


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.01, 500),
    tokens=st.tuples(st.integers(1, 20_000), st.integers(1, 4_000)),
    prefix=st.floats(0, 1),
    ttft=st.floats(0.2, 10),
    tpot=st.floats(0.02, 1),
)
def test_fleets_keep_both_times_or_say_why_not(
    rate: float, tokens: tuple[int, int], prefix: float, ttft: float, tpot: float
) -> None:
    rates = Measured(0.01, 1e-4, 0.01, 1e-4)
    worker = Worker(80e9, 16e9, 131072.0)
    demand = Demand(rate, *tokens, prefix, ttft, tpot)
    try:
        fleet = size_fleet(demand, worker, rates)
    except DoesNotFit as error:
        reason = str(error)
    else:
        _keeps(fleet, demand)
        return
    assert re.search("first token|between tokens|workers|stream", reason)


def _keeps(fleet: Fleet, demand: Demand) -> None:
    rate, ttft, tpot = demand.rate, demand.ttft_s, demand.tpot_s
    assert fleet.ttft_s <= ttft * 1.0001
    assert fleet.step_s <= tpot * 1.0001
    assert fleet.streams <= fleet.streams_at_most + 1e-6 <= fleet.streams_that_fit + 1e-3
    assert fleet.rate_at_most >= rate * 0.999
    if fleet.prefill_workers > 1:
        fewer = mean_wait_s(rate, fleet.prefill_s, fleet.prefill_workers - 1)
        assert fewer > ttft - (fleet.ttft_s - fleet.wait_s)


def test_more_load_never_needs_fewer_workers(fleet_of: Callable[[Demand], Fleet]) -> None:
    fleets = [fleet_of(Demand(rate, 2000, 300, 0.5, 0.5, 0.05)) for rate in (1, 10, 50, 200, 1000)]
    for one, more in itertools.pairwise(fleets):
        assert more.prefill_workers >= one.prefill_workers
        assert more.decode_workers >= one.decode_workers
    assert fleets[-1].prefill_workers > 10


def test_prompts_ask_for_prefill_and_answers_for_decode_workers(fleet_of: Callable[[Demand], Fleet]) -> None:
    reading = fleet_of(Demand(100, 8000, 50, ttft_s=1, tpot_s=0.05))
    writing = fleet_of(Demand(100, 200, 2000, ttft_s=1, tpot_s=0.05))
    assert reading.prefill_workers > reading.decode_workers
    assert writing.decode_workers > writing.prefill_workers


def test_what_is_out_of_reach_is_said(fleet_of: Callable[[Demand], Fleet], tmp_path: Path) -> None:
    demand = Demand(10, 2000, 300, ttft_s=0.5, tpot_s=0.05)
    with pytest.raises(DoesNotFit, match=r"first token takes .* 10 ms are wanted"):
        fleet_of(replace(demand, ttft_s=0.01))
    with pytest.raises(DoesNotFit, match="lone stream"):
        fleet_of(replace(demand, tpot_s=0.001))
    with pytest.raises(DoesNotFit, match="one stream of 1000300 tokens"):
        fleet_of(replace(demand, input_tokens=1e6))
    costs = model_costs(read_shape(write_config(tmp_path, LLAMA_3_70B)))
    with pytest.raises(DoesNotFit, match=r"weights of 141\.1 GB do not fit"):
        worker_of(costs, 80e9).streams(100)


def test_prices_add_up(fleet_of: Callable[[Demand], Fleet]) -> None:
    demand = Demand(10, 1000, 100, 0.5, 1, 0.05)
    fleet = fleet_of(demand)
    bill = price_fleet(
        demand, fleet, fleet.prefill_workers + fleet.decode_workers, 3.0, ApiPrice(1.0, 2.0, 0.5)
    )
    assert bill.an_hour == 3.0 * (fleet.prefill_workers + fleet.decode_workers)
    assert bill.per_million_output == pytest.approx(bill.an_hour / (10 * 100 * 3600) * 1e6)
    request = (500 * 1.0 + 500 * 0.5 + 100 * 2.0) / 1e6
    assert bill.api_an_hour == pytest.approx(request * 36000)
    assert bill.break_even_rate == pytest.approx(bill.an_hour / 3600 / request)


def test_idle_cards_are_said_in_words(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, LLAMA_3_8B))
    idle = make_plan(Question(shape, ACCELERATORS["h200"], Demand(0.1, 500, 100)))
    assert "single-digit utilisation" in idle.advice[0]
    busy = make_plan(Question(shape, ACCELERATORS["h200"], Demand(200, 2000, 300, ttft_s=1, tpot_s=0.05)))
    assert not any("single-digit" in line for line in busy.advice)
