"""Turns by cost: nobody's many, long or urgent requests delay anybody else."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue


def filled(*items: tuple[str, str, int, int]) -> FairQueue[str]:
    """(name, tenant, priority, cost)"""
    queue: FairQueue[str] = FairQueue(100)
    for name, tenant, priority, cost in items:
        queue.push(name, tenant=tenant, priority=priority, cost=cost)
    return queue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_of_one_tenant_priority_then_arrival() -> None:
    queue = filled(("a", "t", 0, 900), ("b", "t", 5, 50), ("c", "t", 5, 10))
    assert drained(queue) == ["b", "c", "a"]
    assert queue.head() is None
    with pytest.raises(LookupError):
        queue.pop()


def test_who_has_much_to_do_delays_only_itself() -> None:
    queue = filled(*((f"x{n}", "flood", 9, 100) for n in range(50)), ("y", "quiet", 0, 100))
    assert "y" in [queue.pop() for _ in range(3)]


def test_turns_are_by_tokens_not_by_requests() -> None:
    long = [(f"l{n}", "long", 0, 400) for n in range(20)]
    short = [(f"s{n}", "short", 0, 50) for n in range(200)]
    queue, served = filled(*long, *short), Counter[str]()
    for _ in range(90):
        served["long" if queue.pop().startswith("l") else "short"] += 1
    assert 0.7 < served["long"] * 400 / (served["short"] * 50) < 1.4


def test_an_idle_tenant_saves_no_credit() -> None:
    queue = filled(*((f"x{n}", "x", 0, 100) for n in range(30)))
    queue.push("y", tenant="y", priority=0, cost=10)
    queue.discard("y")
    assert len([queue.pop() for _ in range(20)]) == 20
    for n in range(20):
        queue.push(f"y{n}", tenant="y", priority=0, cost=100)
    assert sum(item.startswith("x") for item in [queue.pop() for _ in range(10)]) in (4, 5, 6)


def test_what_waits_before_a_newcomer_is_bounded_by_its_own_share() -> None:
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
def test_everybody_comes_out_once_and_the_head_stays(pushes: list[tuple[str, int, int, bool]]) -> None:
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
    while (head := queue.head()) is not None:
        assert queue.head() == head
        assert queue.pop() == head
        inside.remove(head)
    assert not inside
    assert queue.cost_before("a", 1e9) == 0


@pytest.mark.parametrize("seed", range(20))
def test_two_tenants_get_the_same_within_a_turn(seed: int) -> None:
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
