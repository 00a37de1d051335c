"""The choice of a decode worker that computes a prompt itself, in plain cases; and the rates of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.attempt.types import LocalPrefill, Role
from gateway.worker_pool.candidates import DecodeCandidate
from gateway.worker_pool.cheapest_pair import SEQUENCE_COST
from gateway.worker_pool.codec import StepTime
from gateway.worker_pool.local_prefill import LocalCandidate, LocalMode, choose_local, local_cost_s
from gateway.worker_pool.router import NoWorker, Route, RouteRequest
from gateway.worker_pool.step_rates import FIRST_TOKEN_S, StepRates, prefill_token_s

DECODE = DecodeCandidate("d1", "f", block_size=16, max_tokens=16_000, free_blocks=1000, sequences=0)
REQUEST = RouteRequest("id", tokens=1000, worst_case_tokens=1100)
CACHED = 60  # blocks of 62: 40 tokens of the request are new
TOKEN_S = 0.0005


def rates(*times: tuple[int, float]) -> StepRates:
    made = StepRates()
    made.record(StepTime(tokens.bit_length() - 1, 5, seconds, tokens) for tokens, seconds in times)
    return made


def candidate(
    name: str = "d1", *, cached: int = CACHED, sequences: int = 0, waiting: int = 0
) -> LocalCandidate:
    decode = replace(DECODE, worker_id=name, cached_blocks=cached, sequences=sequences)
    steps = rates((8, 0.010), (40, 0.020))
    return LocalCandidate(decode, short=256, fallback=500, chunk=32, waiting_tokens=waiting, rates=steps)


def remote(waiting_tokens: int = 0, *, sequences: int = 0) -> Route:
    return Route("p1", "d1", "only_choice", CACHED, cost=40.0 + waiting_tokens + SEQUENCE_COST * sequences)


def choose(
    one: LocalCandidate,
    other: Route | NoWorker,
    mode: LocalMode = LocalMode.AUTO,
    *,
    request: RouteRequest = REQUEST,
    fall_back: bool = False,
) -> Route | None:
    return choose_local(request, other, [one], mode, token_s=TOKEN_S, fall_back=fall_back)


def test_few_new_tokens_do_not_wait_behind_long_prompts() -> None:
    route = choose(candidate(sequences=8), remote(2000, sequences=8))
    assert route is not None
    assert (route.prefill_id, route.decode_id, route.reason) == (None, "d1", "local")
    assert (route.matched_blocks, route.local) == (CACHED, LocalPrefill.SHORT)


def test_fully_cached_prompt_makes_no_round_trip() -> None:
    whole = candidate(cached=62, sequences=8)
    assert choose(whole, remote(sequences=8)) is not None
    assert choose(whole, remote(sequences=8), LocalMode.NEVER) is None
    elsewhere = replace(remote(), decode_id="d2")  # the worker that has it is busy, and the router knows
    assert choose(candidate(cached=62, sequences=60), elsewhere) is None


def test_idle_prefill_worker_spares_running_streams() -> None:
    assert choose(candidate(sequences=8), remote(sequences=8)) is None


def test_idle_workers_spare_the_round_trip() -> None:
    assert choose(candidate(), remote()) is not None


def test_prompts_that_wait_at_the_decode_worker_count() -> None:
    assert choose(candidate(sequences=8), remote(300, sequences=8)) is not None
    assert choose(candidate(sequences=8, waiting=600), remote(300, sequences=8)) is None


@pytest.mark.parametrize(("cached", "is_local"), [(47, True), (46, False)])
def test_bound_counts_new_tokens(cached: int, is_local: bool) -> None:
    route = choose(candidate(cached=cached), remote(), LocalMode.ALWAYS)
    assert (route is not None) is is_local  # 248 and 264 of 256


def test_modes_force_either_way() -> None:
    assert choose(candidate(sequences=8), remote(), LocalMode.ALWAYS) is not None
    assert choose(candidate(), remote(2000), LocalMode.NEVER) is None
    assert choose(candidate(), NoWorker(Role.PREFILL), LocalMode.NEVER, fall_back=True) is None


def test_request_that_was_too_much_goes_to_a_prefill_worker() -> None:
    again = replace(REQUEST, remote=True)
    assert choose(candidate(), remote(2000), LocalMode.ALWAYS, request=again) is None


def test_avoided_and_small_workers_are_left_out() -> None:
    avoiding = replace(REQUEST, avoid=frozenset({"d1"}))
    assert choose(candidate(), remote(2000), request=avoiding) is None
    assert choose(candidate(), remote(2000), request=replace(REQUEST, worst_case_tokens=20_000)) is None


def test_fallback_has_a_bound_of_its_own() -> None:
    missing = NoWorker(Role.PREFILL)
    route = choose(candidate(cached=40), missing, fall_back=True)
    assert route is not None
    assert (route.local, route.reason) == (LocalPrefill.FALLBACK, "fallback")
    assert choose(candidate(cached=30), missing, fall_back=True) is None


def test_decode_worker_with_the_prefix_is_chosen() -> None:
    both = [candidate("d1", cached=50), candidate("d2", cached=CACHED, sequences=2)]
    route = choose_local(REQUEST, remote(2000), both, LocalMode.AUTO, token_s=TOKEN_S, fall_back=False)
    assert route is not None
    assert route.decode_id == "d2"


def test_full_pool_costs() -> None:
    free = candidate()
    full = replace(free, decode=replace(free.decode, free_blocks=0))
    assert local_cost_s(REQUEST, full, TOKEN_S) > local_cost_s(REQUEST, free, TOKEN_S) + 4 * 8 * TOKEN_S


def test_step_time_is_interpolated_and_grows_by_the_rate_of_prefill() -> None:
    steps = rates((8, 0.010), (40, 0.026))
    assert steps.step_s(4, 0.001) == pytest.approx(0.005)
    assert steps.step_s(24, 0.001) == pytest.approx(0.018)
    assert steps.step_s(140, 0.001) == pytest.approx(0.126)
    assert steps.token_s == pytest.approx(0.026 / 40)


def test_rate_of_prefill_is_that_of_large_steps() -> None:
    assert prefill_token_s([rates((8, 0.010)), StepRates()]) == FIRST_TOKEN_S
    assert prefill_token_s([rates((512, 0.2)), rates((512, 0.1))]) == pytest.approx(0.1 / 512)


def test_report_replaces_times_of_its_classes_only() -> None:
    steps = rates((8, 0.010), (512, 0.2))
    steps.record([StepTime(9, 5, 0.4, 512)])
    assert steps.token_s == pytest.approx(0.4 / 512)
    assert steps.step_s(8, 0.0) == pytest.approx(0.010)


def test_blocks_in_a_tier_are_not_new_but_cost_the_time_to_load_them() -> None:
    whole = candidate(cached=CACHED)
    tiered = replace(
        whole, decode=replace(whole.decode, cached_blocks=0, tiered_blocks=CACHED, load_cost=0.1)
    )
    difference = local_cost_s(REQUEST, tiered, TOKEN_S) - local_cost_s(REQUEST, whole, TOKEN_S)
    assert difference == pytest.approx(0.1 * CACHED * 16 * TOKEN_S)
    route = choose(tiered, NoWorker(Role.PREFILL), LocalMode.ALWAYS)
    assert route is not None
    assert route.matched_blocks == CACHED
