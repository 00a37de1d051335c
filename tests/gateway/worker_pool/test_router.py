"""The router in plain cases, and against brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.attempt.types import Role
from gateway.worker_pool import cheapest_pair
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.cheapest_pair import pair_cost, tie_break
from gateway.worker_pool.pair_savings import most_saved_tokens, pair_saving
from gateway.worker_pool.router import NoWorker, Route, RouteRequest, choose_route

PREFILL = PrefillCandidate("p1", "f", waiting_tokens=0)
DECODE = DecodeCandidate("d1", "f", block_size=16, max_tokens=16_000, free_blocks=1000, sequences=0)
REQUEST = RouteRequest("id", tokens=1000, worst_case_tokens=1100)


def chosen(route: Route | NoWorker) -> tuple[str | None, str]:
    assert isinstance(route, Route)
    return route.prefill_id, route.decode_id


def test_single_pair_is_chosen_as_only_choice() -> None:
    route = choose_route(REQUEST, [PREFILL], [DECODE])
    assert isinstance(route, Route)
    assert (route.reason, route.matched_blocks) == ("only_choice", 0)


def test_long_prefix_outweighs_some_load_only() -> None:
    owner = replace(DECODE, worker_id="d2", cached_blocks=50, sequences=8)
    route = choose_route(REQUEST, [PREFILL], [DECODE, owner])
    assert isinstance(route, Route)
    assert (route.decode_id, route.reason, route.matched_blocks) == ("d2", "prefix", 50)
    assert chosen(choose_route(REQUEST, [PREFILL], [DECODE, replace(owner, sequences=60)])) == ("p1", "d1")


def test_shorter_prefill_queue_wins() -> None:
    other = PrefillCandidate("p2", "f", waiting_tokens=500)
    assert chosen(choose_route(REQUEST, [other, PREFILL], [DECODE])) == ("p1", "d1")


def test_recomputing_is_cheaper_than_a_full_pool() -> None:
    full = replace(DECODE, worker_id="d2", cached_blocks=20, free_blocks=0)
    assert chosen(choose_route(REQUEST, [PREFILL], [DECODE, full])) == ("p1", "d1")


def test_matched_blocks_leave_one_token_to_compute() -> None:
    request = RouteRequest("id", tokens=160, worst_case_tokens=200)
    route = choose_route(request, [PREFILL], [replace(DECODE, cached_blocks=10)])
    assert isinstance(route, Route)
    assert route.matched_blocks == 9


def test_missing_role_is_returned() -> None:
    assert choose_route(REQUEST, [], [DECODE]) == NoWorker(Role.PREFILL)
    assert choose_route(REQUEST, [PREFILL], []) == NoWorker(Role.DECODE)
    assert choose_route(REQUEST, [PREFILL], [replace(DECODE, kv_format="g")]) == NoWorker(Role.DECODE)
    assert choose_route(REQUEST, [PREFILL], [replace(DECODE, max_tokens=1099)]) == NoWorker(Role.DECODE)
    assert choose_route(replace(REQUEST, avoid=frozenset({"d1"})), [PREFILL], [DECODE]) == NoWorker(
        Role.DECODE
    )


def test_equal_workers_share_the_requests() -> None:
    decode = [replace(DECODE, worker_id=f"d{n}") for n in range(4)]
    picks = [
        chosen(choose_route(replace(REQUEST, affinity=str(n)), [PREFILL], decode))[1] for n in range(400)
    ]
    assert all(60 < picks.count(d.worker_id) < 140 for d in decode)


names = st.sampled_from("abcd")
prefills = st.lists(
    st.builds(PrefillCandidate, names, st.sampled_from("fg"), st.integers(0, 5000)),
    unique_by=lambda p: p.worker_id,
)
decodes = st.lists(
    st.builds(
        DecodeCandidate,
        names.map(str.upper),
        st.sampled_from("fg"),
        block_size=st.sampled_from([8, 16]),
        max_tokens=st.integers(1, 4000),
        free_blocks=st.integers(0, 400),
        sequences=st.integers(0, 64),
        cached_blocks=st.integers(0, 200),
    ),
    unique_by=lambda d: d.worker_id,
)


@given(prefills, decodes, st.integers(1, 3000), st.integers(0, 500), st.frozensets(names))
def test_chosen_pair_is_allowed_and_cheapest(
    prefill: list[PrefillCandidate],
    decode: list[DecodeCandidate],
    tokens: int,
    output: int,
    avoid: frozenset[str],
) -> None:
    request = RouteRequest("r", tokens, tokens + output, avoid)
    route = choose_route(request, prefill, decode)
    alone = [choose_route(request, [p], [d]) for p in prefill for d in decode]
    possible = [one for one in alone if isinstance(one, Route)]
    if isinstance(route, NoWorker):
        assert not possible
        return
    assert route.cost == min(one.cost for one in possible)
    assert (route.prefill_id, route.decode_id) in {(one.prefill_id, one.decode_id) for one in possible}
    assert route.prefill_id not in avoid
    reversed_order = choose_route(request, prefill[::-1], decode[::-1])
    assert chosen(reversed_order) == (route.prefill_id, route.decode_id)


memories = st.sampled_from(["", "x", "y"])
copying_prefills = st.lists(
    st.builds(
        PrefillCandidate,
        names,
        st.sampled_from("fg"),
        st.sampled_from([0, 0, 16, 100]),
        memory_domain=memories,
        cached_blocks=st.integers(0, 6),
        pull_cost=st.sampled_from([None, 0.25, 0.5, 1.5]),
        tiered_blocks=st.sampled_from([0, 0, 3]),
        load_cost=st.sampled_from([0.0, 0.125]),
    ),
    unique_by=lambda p: p.worker_id,
)
tiered_decodes = st.lists(
    st.builds(
        DecodeCandidate,
        names.map(str.upper),
        st.sampled_from("fg"),
        block_size=st.sampled_from([8, 16]),
        max_tokens=st.just(4000),
        free_blocks=st.sampled_from([0, 4, 400]),
        sequences=st.sampled_from([0, 0, 1, 4]),
        cached_blocks=st.sampled_from([0, 0, 3, 6]),
        memory_domain=memories,
        tiered_blocks=st.sampled_from([0, 0, 2]),
        load_cost=st.sampled_from([0.0, 0.125]),
    ),
    unique_by=lambda d: d.worker_id,
)


def exhaustive(request: RouteRequest, pairs: list[tuple[PrefillCandidate, DecodeCandidate]]) -> Route:
    """Return what a look at every pair chooses: the rule itself."""

    def order(pair: tuple[PrefillCandidate, DecodeCandidate]) -> tuple[object, ...]:
        ties = [tie_break(request.affinity, one.worker_id) for one in pair]
        return pair_cost(request.tokens, *pair), ties[1], ties[0], pair[1].worker_id, pair[0].worker_id

    source, target = min(pairs, key=order)
    saved = {pair: pair_saving(request.tokens, *pair).blocks for pair in pairs}
    blocks = saved[source, target]
    others = [number for pair, number in saved.items() if pair != (source, target)]
    reason = "only_choice"
    if others:
        reason = "prefix" if blocks > min(others) and blocks >= max(others) else "load"
    cost = pair_cost(request.tokens, source, target)
    return Route(source.worker_id, target.worker_id, reason, blocks, cost)


def compare(
    prefill: list[PrefillCandidate], decode: list[DecodeCandidate], tokens: int, affinity: str
) -> None:
    request = RouteRequest(affinity, tokens, tokens)
    pairs = [(p, d) for p in prefill for d in decode if p.kv_format == d.kv_format]
    if pairs:
        assert choose_route(request, prefill, decode) == exhaustive(request, pairs)


@settings(max_examples=200)
@given(copying_prefills, tiered_decodes, st.sampled_from([1, 17, 60, 100]), st.sampled_from("rst"))
def test_choice_is_that_of_a_look_at_every_pair(
    prefill: list[PrefillCandidate], decode: list[DecodeCandidate], tokens: int, affinity: str
) -> None:
    compare(prefill, decode, tokens, affinity)


@given(copying_prefills, tiered_decodes, st.sampled_from([1, 17, 60, 100]))
def test_most_saved_tokens_are_those_of_a_look_at_every_pair(
    prefill: list[PrefillCandidate], decode: list[DecodeCandidate], tokens: int
) -> None:
    saved = [
        pair_saving(tokens, p, d).blocks * d.block_size
        for p in prefill
        for d in decode
        if p.kv_format == d.kv_format
    ]
    if prefill:
        assert most_saved_tokens(tokens, prefill, decode) == max(saved, default=0)


def test_a_search_that_forgets_the_second_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the best prefill worker elsewhere may share the memory of the decode worker."""
    whole = cheapest_pair._Group._best_elsewhere
    monkeypatch.setattr(cheapest_pair._Group, "_best_elsewhere", lambda group: whole(group)[:1])
    near = replace(PREFILL, memory_domain="x", cached_blocks=6)
    far = replace(PREFILL, worker_id="p2", memory_domain="y", cached_blocks=3)
    decode = [
        replace(DECODE, memory_domain="x"),
        replace(DECODE, worker_id="d2", memory_domain="z", sequences=200),
    ]
    with pytest.raises(AssertionError):
        compare([near, far], decode, 100, "r")


def test_work_grows_with_the_workers_and_not_with_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = cheapest_pair.pair_saving

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return real(*given)

    monkeypatch.setattr(cheapest_pair, "pair_saving", counted)

    def looks_at(count: int) -> int:
        nonlocal looks
        looks = 0
        prefill = [
            replace(PREFILL, worker_id=f"p{n}", memory_domain=str(n), waiting_tokens=n) for n in range(count)
        ]
        decode = [
            replace(DECODE, worker_id=f"d{n}", memory_domain=str(n), sequences=n % 7, cached_blocks=n % 3)
            for n in range(count)
        ]
        choose_route(REQUEST, prefill, decode)
        return looks

    assert looks_at(64) < 5 * looks_at(16)
