"""The router in plain cases, and against brute force."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.attempt.types import Role
from gateway.worker_pool.router import (
    DecodeCandidate,
    NoWorker,
    PrefillCandidate,
    Route,
    RouteRequest,
    choose_route,
)

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
