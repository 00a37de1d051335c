"""Capacity of the workers: the KV memory budget of running requests, and the measured prefill rate."""

from __future__ import annotations

import pytest

from diptych.runtime.errors import QueueFull
from gateway.admission.capacity import FIRST_GUESS_TOKENS, FIRST_S, Capacity, KvBudget, ThroughputEstimator
from gateway.admission.gate import AdmissionGate
from gateway.admission.queue import AdmissionQueue
from gateway.admission.wait import MaxQueueDelay

SIZE = 16


def budget(blocks: int) -> KvBudget:
    made = KvBudget()
    made.resize(blocks * SIZE, SIZE)
    return made


def need(budget: KvBudget, prompt: int, max_tokens: int, sequences: int, tenant: str) -> int:
    shared, own = budget.parts(prompt, max_tokens, tenant)
    return budget.clipped(shared + sequences * own)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sequences", "blocks"),
    [
        (1, 1, 1, 1),
        (16, 16, 1, 2),
        (15, 2, 1, 2),
        (17, 15, 1, 2),
        (32, 1, 4, 6),
        (40, 8, 3, 5),
        (40, 9, 3, 8),
    ],
)
def test_kv_need_is_in_whole_blocks_with_shared_prompt_blocks(
    prompt: int, max_tokens: int, sequences: int, blocks: int
) -> None:
    assert need(budget(1000), prompt, max_tokens, sequences, "") == blocks * SIZE


def test_kv_need_follows_the_average_output_of_the_tenant() -> None:
    one = budget(10_000)
    guess = need(one, 16, 100_000, 1, "a")
    assert guess == 16 + FIRST_GUESS_TOKENS
    one.learn("a", 32)
    assert need(one, 16, 100_000, 1, "a") == 48
    assert need(one, 16, 8, 1, "a") == 32
    assert need(one, 16, 100_000, 1, "b") == guess
    for _ in range(200):
        one.learn("a", 640)
    assert 16 + 600 < need(one, 16, 100_000, 1, "a") <= 16 + 640


def test_kv_need_is_bounded_by_the_capacity() -> None:
    one = budget(10)
    assert need(one, 1000, 1000, 4, "") == 10 * SIZE
    assert one.excess(10 * SIZE) == 0.0
    one.reserve(10 * SIZE)
    assert one.excess(5 * SIZE) == 0.5
    assert not one.fits(1)


def test_unknown_kv_capacity_is_no_limit() -> None:
    one = KvBudget()
    one.reserve(need(one, 10**9, 10**9, 8, ""))
    assert one.fits(10**9)
    assert one.excess(10**9) == 0.0


def test_queue_holds_a_request_until_its_kv_memory_fits() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(10 * SIZE, SIZE)
    tickets = [queue.enqueue(2 * SIZE, max_tokens=SIZE, now=0) for _ in range(5)]
    assert [ticket.admitted for ticket in tickets] == [True, True, True, False, False]
    small = queue.enqueue(1, max_tokens=1, now=0)
    assert not small.admitted, "it would fit, but the one before it must not starve"
    assert queue.leave(tickets[3]) == []
    assert queue.leave(tickets[0]) == [tickets[4], small]
    queue.invariants()
    for ticket in (tickets[1], tickets[2], tickets[4], small):
        queue.leave(ticket)
    assert queue.kv.reserved == 0


def test_request_larger_than_kv_memory_is_admitted_when_nothing_runs() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(4 * SIZE, SIZE)
    first = queue.enqueue(1, max_tokens=1, now=0)
    large = queue.enqueue(500, max_tokens=500, now=0)
    assert not large.admitted
    assert queue.leave(first) == [large]
    queue.invariants()


def test_shorter_outputs_admit_more_requests() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(64 * SIZE, SIZE)
    size = int(FIRST_GUESS_TOKENS)
    first = [queue.enqueue(1, max_tokens=4 * size, now=0) for _ in range(8)]
    before = sum(ticket.admitted for ticket in first)
    for ticket in first:
        queue.leave(ticket, 1.0, 4.0)
    later = [queue.enqueue(1, max_tokens=4 * size, now=2) for _ in range(8)]
    assert before == 3
    assert all(ticket.admitted for ticket in later)


def test_predicted_wait_for_kv_memory_counts_against_max_queue_delay() -> None:
    """Fill the memory with one request of ten seconds after the other: the third would wait for two."""
    queue = AdmissionQueue(100, 1_000_000, max_delay=MaxQueueDelay(seconds=15.0))
    queue.kv.resize(4 * SIZE, SIZE)
    first = queue.enqueue(3 * SIZE, max_tokens=SIZE, now=0)
    queue.prefilled(first, 1.0)
    assert queue.leave(first, 10.0, SIZE) == []
    running, waiting = (queue.enqueue(3 * SIZE, max_tokens=SIZE, now=20) for _ in range(2))
    assert (running.admitted, waiting.admitted) == (True, False)
    with pytest.raises(QueueFull):
        queue.enqueue(3 * SIZE, max_tokens=SIZE, now=20)


def test_resize_to_more_kv_memory_admits_at_once() -> None:
    called = []
    gate = AdmissionGate(AdmissionQueue(100, 1_000_000), lambda: 0.0)
    gate.resize(Capacity(100, 1, 2 * SIZE, SIZE))
    for name in "abc":
        gate.enter(
            SIZE,
            max_tokens=SIZE,
            priority=0,
            time_left_s=None,
            on_admitted=lambda _, name=name: called.append(name),  # type: ignore[misc]
        )
    assert called == ["a"]
    gate.resize(Capacity(100, 1, 4 * SIZE, SIZE))
    assert called == ["a", "b"]


def work(rate: ThroughputEstimator, per_s: float, start: float, seconds: float) -> float:
    now = start
    rate.begin(now)
    for _ in range(round(seconds * 10)):
        now += 0.1
        rate.done(per_s / 10, now, more=True)
    rate.done(0, now, more=False)
    return now


def test_throughput_is_unknown_at_first() -> None:
    rate = ThroughputEstimator()
    rate.begin(0.0)
    rate.done(50, FIRST_S / 2, more=True)
    assert rate.per_s is None
    rate.done(50, 2 * FIRST_S, more=True)
    assert rate.per_s == pytest.approx(100 / (2 * FIRST_S), rel=0.1)


@pytest.mark.parametrize("idle_s", [1, 5, 600])
def test_throughput_ignores_idle_time(idle_s: float) -> None:
    rate = ThroughputEstimator()
    now = work(rate, 1000, 0.0, 2)
    now = work(rate, 1000, now + idle_s, 2)
    assert rate.per_s == pytest.approx(1000, rel=0.05)


def test_throughput_is_unknown_after_a_pause() -> None:
    rate = ThroughputEstimator()
    now = work(rate, 10, 0.0, 30)
    rate.begin(now + 1)
    assert rate.per_s == pytest.approx(10, rel=0.1)
    rate.done(0, now + 1, more=False)
    rate.skip(now + 9)
    rate.begin(now + 10)
    assert rate.per_s is None


def test_throughput_follows_a_change() -> None:
    rate = ThroughputEstimator()
    now = work(rate, 1000, 0.0, 20)
    work(rate, 100, now, 10)
    assert rate.per_s is not None
    assert rate.per_s < 150


def test_layers_with_a_window_take_blocks_of_their_own() -> None:
    """Two more for each of the last three blocks of tokens: short requests take more than their tokens."""
    budget = KvBudget()
    budget.resize(100 * SIZE, SIZE, (2, 3))
    assert budget.parts(2 * SIZE, 0, "a") == (2 * SIZE, 4 * SIZE)
    assert budget.parts(20 * SIZE, SIZE, "a") == (20 * SIZE, (1 + 6) * SIZE)
