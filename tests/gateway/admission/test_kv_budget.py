"""Requests wait in the gateway until the decode workers' memory holds them to their end, as predicted."""

from __future__ import annotations

import pytest

from diptych.runtime.errors import QueueFull
from gateway.admission.admission import AdmissionQueue, MaxQueueDelay
from gateway.admission.gate import AdmissionGate, Capacity
from gateway.admission.kv_budget import FIRST_GUESS_TOKENS, KvBudget

SIZE = 16


def budget(blocks: int) -> KvBudget:
    made = KvBudget()
    made.resize(blocks * SIZE, SIZE)
    return made


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
def test_a_need_is_in_whole_blocks_of_which_choices_share_the_full_ones_of_their_prompt(
    prompt: int, max_tokens: int, sequences: int, blocks: int
) -> None:
    assert budget(1000).need(prompt, max_tokens, sequences, "") == blocks * SIZE


def test_outputs_are_as_long_as_those_before_them_of_the_same_tenant_and_never_longer_than_allowed() -> None:
    one = budget(10_000)
    guess = one.need(16, 100_000, 1, "a")
    assert guess == 16 + FIRST_GUESS_TOKENS
    one.learn("a", 32)
    assert one.need(16, 100_000, 1, "a") == 48
    assert one.need(16, 8, 1, "a") == 32
    assert one.need(16, 100_000, 1, "b") == guess
    for _ in range(200):
        one.learn("a", 640)
    assert 16 + 600 < one.need(16, 100_000, 1, "a") <= 16 + 640


def test_what_is_more_than_all_there_is_needs_all_there_is() -> None:
    one = budget(10)
    assert one.need(1000, 1000, 4, "") == 10 * SIZE
    assert one.excess(10 * SIZE) == 0.0
    one.take(10 * SIZE)
    assert one.excess(5 * SIZE) == 0.5
    assert not one.fits(1)


def test_memory_that_is_not_known_is_no_limit() -> None:
    one = KvBudget()
    one.take(one.need(10**9, 10**9, 8, ""))
    assert one.fits(10**9)
    assert one.excess(10**9) == 0.0


def test_who_does_not_fit_waits_until_another_has_ended() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(10 * SIZE, SIZE)
    tickets = [queue.offer(2 * SIZE, max_tokens=SIZE, now=0) for _ in range(5)]
    assert [ticket.admitted for ticket in tickets] == [True, True, True, False, False]
    small = queue.offer(1, max_tokens=1, now=0)
    assert not small.admitted, "it would fit, but the one before it must not starve"
    assert queue.leave(tickets[3]) == []
    assert queue.leave(tickets[0]) == [tickets[4], small]
    queue.invariants()
    for ticket in (tickets[1], tickets[2], tickets[4], small):
        queue.leave(ticket)
    assert queue.kv.reserved == 0


def test_a_request_larger_than_the_memory_comes_in_when_nothing_runs() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(4 * SIZE, SIZE)
    first = queue.offer(1, max_tokens=1, now=0)
    large = queue.offer(500, max_tokens=500, now=0)
    assert not large.admitted
    assert queue.leave(first) == [large]
    queue.invariants()


def test_shorter_outputs_than_were_thought_let_more_run() -> None:
    queue = AdmissionQueue(100, 1_000_000)
    queue.kv.resize(64 * SIZE, SIZE)
    size = int(FIRST_GUESS_TOKENS)
    first = [queue.offer(1, max_tokens=4 * size, now=0) for _ in range(8)]
    before = sum(ticket.admitted for ticket in first)
    for ticket in first:
        queue.leave(ticket, 1.0, 4.0)
    later = [queue.offer(1, max_tokens=4 * size, now=2) for _ in range(8)]
    assert before == 3
    assert all(ticket.admitted for ticket in later)


def test_the_way_to_memory_counts_against_patience() -> None:
    """One request after the other fills the memory and stays ten seconds: the third would wait for two."""
    queue = AdmissionQueue(100, 1_000_000, patience=MaxQueueDelay(seconds=15.0))
    queue.kv.resize(4 * SIZE, SIZE)
    first = queue.offer(3 * SIZE, max_tokens=SIZE, now=0)
    queue.prefilled(first, 1.0)
    assert queue.leave(first, 10.0, SIZE) == []
    running, waiting = (queue.offer(3 * SIZE, max_tokens=SIZE, now=20) for _ in range(2))
    assert (running.admitted, waiting.admitted) == (True, False)
    with pytest.raises(QueueFull):
        queue.offer(3 * SIZE, max_tokens=SIZE, now=20)


def test_more_memory_admits_at_once() -> None:
    called = []
    gate = AdmissionGate(AdmissionQueue(100, 1_000_000), lambda: 0.0)
    gate.resize(Capacity(100, 1, 2 * SIZE, SIZE))
    for name in "abc":
        gate.enter(
            SIZE,
            max_tokens=SIZE,
            priority=0,
            time_left_s=None,
            on_admitted=lambda name=name: called.append(name),  # type: ignore[misc]
        )
    assert called == ["a"]
    gate.resize(Capacity(100, 1, 4 * SIZE, SIZE))
    assert called == ["a", "b"]
