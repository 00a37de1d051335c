"""Service of tenants at other gateways: debts in the queue's turns, and unequal shares of the places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.elsewhere import FADE_S, FLOOR_PARTS, Elsewhere, fair_level
from gateway.admission.fair_queue import FairQueue


def owing(tokens: float, tenant: str = "a", other: str = "b") -> Elsewhere:
    made = Elsewhere()
    made.update({tenant: tokens}, {}, {tenant, other}, 0.0)
    return made


def test_only_what_the_least_served_competitor_did_not_get_is_owed() -> None:
    made = Elsewhere()
    assert made.update({"a": 900, "b": 500, "c": 4000}, {}, {"a", "b"}, 0.0) == 400
    assert (made.debt("a"), made.debt("b"), made.debt("c")) == (400, 0, 0)


def test_a_tenant_that_competes_with_none_owes_nothing() -> None:
    made = Elsewhere()
    assert made.update({"a": 900}, {}, {"a"}, 0.0) == 0
    made.note_waiting("a")  # and went before the update
    made.note_waiting("b")
    assert made.update({"a": 900}, {}, set(), 0.1) == 900
    assert made.update({"a": 900}, {}, {"a"}, 0.2) == 0, "what competed is asked anew each time"


def test_debts_fade_and_are_forgotten() -> None:
    made = owing(1000)
    made.update({}, {}, set(), FADE_S)
    assert 300 < made.debt("a") < 400
    made.forget()
    assert made.debt("a") == 0


def test_a_debt_is_paid_out_of_turns_but_for_a_floor() -> None:
    made = owing(800)
    assert made.pay("a", 512) == 512 / FLOOR_PARTS
    assert made.debt("a") == 800 - 480
    assert made.pay("a", 512) == 512 - 320
    assert made.pay("a", 512) == made.pay("b", 512) == 512


def test_queue_serves_others_first_until_a_debt_is_paid() -> None:
    for debt, expected in ((0, 20), (1000, 10), (100_000, 2)):
        queue: FairQueue[str] = FairQueue(512, owing(debt) if debt else None)
        for number in range(100):
            for tenant in "ab":
                queue.push(f"{tenant}{number}", tenant=tenant, priority=0, cost=100)
        served = sum(queue.pop().startswith("a") for _ in range(40))
        assert abs(served - expected) <= 5


def test_cost_before_a_request_counts_turns_that_pay() -> None:
    queue: FairQueue[str] = FairQueue(512, owing(1000))
    for number in range(50):
        queue.push(f"b{number}", tenant="b", priority=0, cost=100)
    assert queue.cost_before("a", 100) == 1100
    assert queue.cost_before("b", 100) == 5000


@given(st.integers(1, 300), st.lists(st.integers(0, 500), min_size=1, max_size=12))
def test_level_fills_exactly_the_places(places: int, held: list[int]) -> None:
    level = fair_level(places, held)
    assert sum(max(level - one, 0) for one in held) == pytest.approx(places)


@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 500)),
    st.sets(st.sampled_from("abcdef"), min_size=1),
)
def test_shares_of_places_are_max_min_fair_with_a_floor(
    places: int, running: dict[str, int], tenants: set[str]
) -> None:
    made = Elsewhere()
    made.update({}, running, tenants, 0.0)
    shares = made.shares(places, tenants)
    equal = places / len(tenants)
    floor = min(max(places / FLOOR_PARTS, 1.0), equal)
    assert shares.keys() == tenants
    assert min(shares.values()) >= floor - 1e-9
    assert sum(shares.values()) <= places + len(tenants) * floor + 1e-6
    for one in tenants:
        for other in tenants:
            if running.get(one, 0) >= running.get(other, 0):
                assert shares[one] <= shares[other] + 1e-9


def test_shares_are_equal_where_nothing_is_known_of_others() -> None:
    assert Elsewhere().shares(9, {"a", "b", "c"}) == {"a": 3, "b": 3, "c": 3}
