"""The tokens that a pair saves, in place and where blocks are copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.pair_savings import PairSaving, most_saved_tokens, pair_saving
from gateway.worker_pool.router import Route, RouteRequest, choose_route

COPYING = PrefillCandidate("p1", "f", waiting_tokens=0, memory_domain="host", pull_cost=0.1)
OWNER = DecodeCandidate(
    "d1",
    "f",
    block_size=16,
    max_tokens=16_000,
    free_blocks=1000,
    sequences=0,
    cached_blocks=20,
    memory_domain="copies/d1",
)
REQUEST = RouteRequest("id", tokens=359, worst_case_tokens=400)


def test_pair_in_one_memory_saves_what_the_decode_worker_holds() -> None:
    one_memory = replace(COPYING, memory_domain="copies/d1", pull_cost=None)
    assert pair_saving(359, one_memory, OWNER) == PairSaving(20, pulled=0)


@pytest.mark.parametrize("pull_cost", [None, 1.0, 2.5])
def test_copying_pair_saves_its_own_blocks_where_a_pull_does_not_pay(pull_cost: float | None) -> None:
    prefill = replace(COPYING, cached_blocks=2, pull_cost=pull_cost)
    assert pair_saving(359, prefill, OWNER) == PairSaving(2, pulled=0)


def test_copying_pair_pulls_what_only_the_decode_worker_holds() -> None:
    prefill = replace(COPYING, cached_blocks=2)
    saving = pair_saving(359, prefill, OWNER)
    assert saving == PairSaving(20, pulled=18)
    assert saving.compute_cost(359, 16, 0.1) == pytest.approx(359 - 320 + 0.1 * 18 * 16)


def test_own_blocks_save_work_that_the_decode_worker_lacks() -> None:
    assert pair_saving(359, replace(COPYING, cached_blocks=21), OWNER) == PairSaving(21, pulled=0)


def test_one_token_is_always_computed() -> None:
    assert pair_saving(320, COPYING, OWNER).blocks == 19
    assert pair_saving(320, replace(COPYING, cached_blocks=40), OWNER).blocks == 19


def test_prefill_worker_with_the_prefix_is_preferred_where_blocks_are_copied() -> None:
    owner = replace(COPYING, worker_id="p2", cached_blocks=20)
    route = choose_route(REQUEST, [COPYING, owner], [OWNER])
    assert isinstance(route, Route)
    assert (route.prefill_id, route.matched_blocks) == ("p2", 20)
    busy = replace(owner, waiting_tokens=100)
    route = choose_route(REQUEST, [COPYING, busy], [OWNER])
    assert isinstance(route, Route)
    assert (route.prefill_id, route.matched_blocks) == ("p1", 20), "pulling costs less than waiting"


def test_promise_counts_only_what_the_chosen_pair_saves() -> None:
    route = choose_route(REQUEST, [replace(COPYING, pull_cost=None)], [OWNER])
    assert isinstance(route, Route)
    assert route.matched_blocks == 0


def test_reason_is_the_prefix_where_other_pairs_save_less() -> None:
    other = replace(OWNER, worker_id="d2", cached_blocks=0, memory_domain="copies/d2")
    route = choose_route(REQUEST, [COPYING], [OWNER, other])
    assert isinstance(route, Route)
    assert (route.decode_id, route.reason) == ("d1", "prefix")


def test_most_saved_tokens_looks_at_fitting_pairs() -> None:
    assert most_saved_tokens(359, [COPYING], [OWNER]) == 320
    assert most_saved_tokens(359, [replace(COPYING, kv_format="g")], [OWNER]) == 0
    assert most_saved_tokens(359, [], [OWNER]) == 320, (
        "the decode worker's own, until a prefill worker is there"
    )
    assert most_saved_tokens(359, [COPYING], []) == 0


def test_blocks_in_a_tier_are_saved_and_charged_by_the_time_to_load_them() -> None:
    tiered = replace(OWNER, cached_blocks=4, tiered_blocks=16, load_cost=0.25)
    one_memory = replace(COPYING, memory_domain=tiered.memory_domain)
    saving = pair_saving(359, one_memory, tiered)
    assert saving == PairSaving(20, pulled=0, loaded=16)
    assert saving.compute_cost(359, 16, None, 0.25) == pytest.approx(359 - 320 + 0.25 * 16 * 16)
    pulled = pair_saving(359, COPYING, tiered)
    assert pulled == PairSaving(20, pulled=20, loaded=16), "loaded first, then pulled"


@pytest.mark.parametrize(("load_cost", "chosen"), [(0.1, "d1"), (2.0, "d2")])
def test_tier_attracts_a_prompt_while_loading_costs_less_than_computing(
    load_cost: float, chosen: str
) -> None:
    tiered = replace(OWNER, cached_blocks=0, tiered_blocks=20, load_cost=load_cost)
    other = replace(OWNER, worker_id="d2", cached_blocks=0)
    route = choose_route(REQUEST, [replace(COPYING, memory_domain=OWNER.memory_domain)], [tiered, other])
    assert isinstance(route, Route)
    assert route.decode_id == chosen


def test_pool_is_preferred_to_a_tier_and_loaded_blocks_need_room() -> None:
    writer = replace(COPYING, memory_domain=OWNER.memory_domain)
    tiered = replace(OWNER, worker_id="d0", cached_blocks=0, tiered_blocks=20, load_cost=0.1)
    route = choose_route(REQUEST, [writer], [tiered, OWNER])
    assert isinstance(route, Route)
    assert route.decode_id == "d1"
    costs = [
        choose_route(REQUEST, [writer], [replace(tiered, free_blocks=free)]).cost  # type: ignore[union-attr]
        for free in (23, 13)
    ]
    assert costs[1] - costs[0] == pytest.approx(10 * 16 * 4.0)


def test_copying_worker_is_charged_for_what_it_reads_from_its_tiers() -> None:
    reading = replace(COPYING, cached_blocks=4, tiered_blocks=12, load_cost=0.25, pull_cost=None)
    saving = pair_saving(359, reading, OWNER)
    assert saving == PairSaving(16, pulled=0, read=12)
    assert saving.compute_cost(359, 16, None, 0.0, 0.25) == pytest.approx(359 - 256 + 0.25 * 12 * 16)
    pulling = pair_saving(359, replace(reading, pull_cost=0.1), OWNER)
    assert pulling == PairSaving(20, pulled=4, read=12)


def test_both_workers_of_a_pair_load_at_the_same_time() -> None:
    saving = PairSaving(20, pulled=4, loaded=20, read=16)
    both = saving.compute_cost(359, 16, 0.0, 0.25, 0.5)
    assert both == pytest.approx(359 - 320 + max(20 * 16 * 0.25, 16 * 16 * 0.5))


@pytest.mark.parametrize(("load_cost", "chosen"), [(0.1, "p2"), (2.0, "p1")])
def test_tier_of_a_prefill_worker_attracts_a_prompt_while_loading_costs_less(
    load_cost: float, chosen: str
) -> None:
    reading = replace(COPYING, worker_id="p2", tiered_blocks=20, load_cost=load_cost)
    route = choose_route(REQUEST, [COPYING, reading], [replace(OWNER, cached_blocks=0)])
    assert isinstance(route, Route)
    assert route.prefill_id == chosen
