"""Fairness between tenants: turns by cost in `FairQueue`, equal shares of a full queue in `FairShares`."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue, FairShares


def filled(*items: tuple[str, str, int, int]) -> FairQueue[str]:
    """(name, tenant, priority, cost)"""
    queue: FairQueue[str] = FairQueue(100)
    for name, tenant, priority, cost in items:
        queue.push(name, tenant=tenant, priority=priority, cost=cost)
    return queue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_fair_queue_orders_one_tenant_by_priority_then_arrival() -> None:
    queue = filled(("a", "t", 0, 900), ("b", "t", 5, 50), ("c", "t", 5, 10))
    assert drained(queue) == ["b", "c", "a"]
    assert queue.head() is None
    with pytest.raises(LookupError):
        queue.pop()


def test_fair_queue_delays_a_flood_only() -> None:
    queue = filled(*((f"x{n}", "flood", 9, 100) for n in range(50)), ("y", "quiet", 0, 100))
    assert "y" in [queue.pop() for _ in range(3)]


def test_fair_queue_turns_are_by_tokens() -> None:
    long = [(f"l{n}", "long", 0, 400) for n in range(20)]
    short = [(f"s{n}", "short", 0, 50) for n in range(200)]
    queue, served = filled(*long, *short), Counter[str]()
    for _ in range(90):
        served["long" if queue.pop().startswith("l") else "short"] += 1
    assert 0.7 < served["long"] * 400 / (served["short"] * 50) < 1.4


def test_fair_queue_ends_a_turn_where_the_credit_does_not_cover_the_next_request() -> None:
    """Whatever the costs: a rest of credit is kept for the next turn, and buys no second quantum."""
    for cost in (30, 33, 51, 99):
        queue = filled(*((f"{tenant}{n}", tenant, 0, cost) for n in range(40) for tenant in "xy"))
        longest = max(len(list(turn)) for _, turn in groupby(one[0] for one in drained(queue)[:60]))
        assert longest <= 100 // cost + 1


def test_fair_queue_gives_an_idle_tenant_no_credit() -> None:
    queue = filled(*((f"x{n}", "x", 0, 100) for n in range(30)))
    queue.push("y", tenant="y", priority=0, cost=10)
    queue.discard("y")
    assert len([queue.pop() for _ in range(20)]) == 20
    for n in range(20):
        queue.push(f"y{n}", tenant="y", priority=0, cost=100)
    assert sum(item.startswith("x") for item in [queue.pop() for _ in range(10)]) in (4, 5, 6)


def test_cost_before_counts_other_tenants_by_turns() -> None:
    queue = filled(*((f"x{n}", "flood", 0, 100) for n in range(50)), ("y", "quiet", 0, 30))
    assert queue.cost_before("flood", 100) == 5000 + 30
    assert queue.cost_before("quiet", 70) == 30 + 100
    assert queue.cost_before("new", 70) == 70 + 30


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 2000), st.booleans()),
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_fair_queue_pops_each_item_once_and_keeps_its_head(pushes: list[tuple[str, int, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    inside: set[int] = set()
    for number, (tenant, priority, cost, leaves) in enumerate(pushes):
        queue.push(number, tenant=tenant, priority=priority, cost=cost)
        inside.add(number)
        if leaves:
            gone = min(inside)
            queue.discard(gone)
            inside.discard(gone)
    assert len(queue) == len(inside)
    assert queue.tenants == {pushes[number][0] for number in inside}
    while (head := queue.head()) is not None:
        assert queue.head() == head
        assert queue.pop() == head
        inside.remove(head)
    assert not inside
    assert queue.cost_before("a", 1e9) == 0


@pytest.mark.parametrize("seed", range(20))
def test_fair_queue_serves_two_tenants_equally_within_a_turn(seed: int) -> None:
    rng = random.Random(seed)
    a, b = ([rng.choice((1, 20, 2000)) for _ in range(50)] for _ in range(2))
    queue: FairQueue[tuple[str, int]] = FairQueue(500)
    for tenant, costs in (("a", a), ("b", b)):
        for number, cost in enumerate(costs):
            queue.push((tenant, number), tenant=tenant, priority=0, cost=cost)
    served = {"a": 0, "b": 0}
    left = {"a": len(a), "b": len(b)}
    while min(left.values()) > 0:
        tenant, number = queue.pop()
        left[tenant] -= 1
        served[tenant] += (a if tenant == "a" else b)[number]
        assert abs(served["a"] - served["b"]) <= 2 * (500 + 2000)


def shares_of(size: int, **held: int) -> FairShares:
    shares = FairShares(size)
    for tenant, tokens in held.items():
        shares.take(tenant, tokens)
    return shares


def test_fair_shares_give_a_single_tenant_the_whole_queue() -> None:
    shares = FairShares(100)
    assert shares.fits("a", 500)  # nothing waits
    shares.take("a", 60)
    assert shares.fits("a", 40)
    assert not shares.fits("a", 41)


def test_fair_shares_admit_a_tenant_below_its_share_to_a_full_queue() -> None:
    shares = shares_of(100, a=100)
    assert not shares.fits("a", 1)
    shares.take("b", 20)
    assert shares.fits("b", 30)
    assert not shares.fits("b", 31)
    shares.take("c", 20)  # now a third each
    assert shares.fits("b", 13)
    assert not shares.fits("b", 14)
    shares.give_back("a", 100)  # it does not wait any more: not full for any tenant
    assert shares.fits("b", 60)


def test_fair_shares_admit_a_first_request_longer_than_a_share() -> None:
    shares = shares_of(100, a=100)
    assert shares.fits("b", 80)
    assert not shares.fits("b", 101)


def test_fair_shares_hold_at_most_twice_the_size() -> None:
    shares = shares_of(100, a=100, b=90)
    assert shares.fits("c", 10)
    assert not shares.fits("c", 11)


@pytest.mark.parametrize("seed", range(10))
def test_fair_shares_leave_room_for_a_fourth_tenant_beside_three_floods(seed: int) -> None:
    rng = random.Random(seed)
    shares = FairShares(1000)
    waiting: list[tuple[str, int]] = []
    for _ in range(2000):
        tenant, tokens = rng.choice("aaabc"), rng.randint(1, 50)
        if shares.fits(tenant, tokens):
            shares.take(tenant, tokens)
            waiting.append((tenant, tokens))
        assert shares.total == sum(held for _, held in waiting)
        assert shares.fits("polite", 50)
        if rng.random() < 0.3 and waiting:
            shares.give_back(*waiting.pop(rng.randrange(len(waiting))))
    assert not shares.fits("a", 1000)
