"""The bounded queue: never more than allowed, nobody forgotten, in the right order, honest hints."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.admission import REQUEST_OVERHEAD_TOKENS, AdmissionQueue, Ticket
from runtime.errors import DeadlineUnattainable, QueueFull


def test_higher_priority_first_then_in_order_of_arrival() -> None:
    queue = AdmissionQueue(1, 10_000)
    first = queue.offer(10, now=0)
    low, high, late = (queue.offer(10, priority=p, now=0) for p in (0, 5, 5))
    assert first.admitted
    order = []
    ticket = first
    for _ in range(3):
        (ticket,) = queue.leave(ticket)
        order.append(ticket)
    assert order == [high, late, low]


def test_one_request_is_always_taken_and_the_next_is_refused_with_a_hint() -> None:
    queue = AdmissionQueue(8, 100)
    long = queue.offer(5000, now=0)
    assert long.admitted
    with pytest.raises(QueueFull) as refused:
        queue.offer(1, now=0)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    queue.prefilled(long, 1.0)
    assert queue.offer(1, now=1.0).admitted


def test_a_request_counts_as_many_as_it_makes_and_is_not_passed() -> None:
    queue = AdmissionQueue(4, 10_000)
    three = queue.offer(1, sequences=3, now=0)
    two = queue.offer(1, sequences=2, now=0)
    one = queue.offer(1, now=0)  # there is room, but not for the one before it
    assert [t.admitted for t in (three, two, one)] == [True, False, False]
    assert queue.leave(three) == [two, one]
    queue.invariants()


def test_a_request_larger_than_all_places_comes_in_when_nothing_runs() -> None:
    queue = AdmissionQueue(4, 10_000)
    first = queue.offer(1, now=0)
    large = queue.offer(1, sequences=9, now=0)
    behind = queue.offer(1, now=0)
    assert queue.leave(first) == [large]
    assert not behind.admitted
    assert queue.leave(large) == [behind]
    queue.invariants()


def test_the_limit_itself_still_fits() -> None:
    size = 50 + REQUEST_OVERHEAD_TOKENS
    queue = AdmissionQueue(8, 2 * size)
    queue.offer(50, now=0)
    queue.offer(50, now=0)
    with pytest.raises(QueueFull):
        queue.offer(1, now=0)


def test_a_deadline_that_the_queue_cannot_make_is_refused_at_once() -> None:
    queue = AdmissionQueue(1, 1_000_000)
    rate = queue.offer(1000 - REQUEST_OVERHEAD_TOKENS, now=0.0)
    queue.prefilled(rate, 1.0)  # 1,000 tokens a second
    queue.offer(10_000 - REQUEST_OVERHEAD_TOKENS, now=1.0)  # waits: ten seconds of work
    with pytest.raises(DeadlineUnattainable) as refused:
        queue.offer(10, time_left_s=5.0, now=1.0)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    queue.offer(10, time_left_s=11.0, now=1.0)


def test_no_deadline_is_refused_while_nothing_waits_before_it() -> None:
    queue = AdmissionQueue(2, 1_000_000)
    slow = queue.offer(100, now=0.0)
    queue.prefilled(slow, 100.0)
    assert queue.offer(10_000, time_left_s=0.001, now=100.0).admitted


class QueueMachine(RuleBasedStateMachine):
    @initialize(running=st.integers(1, 3), tokens=st.integers(50, 400))
    def begin(self, running: int, tokens: int) -> None:
        self.queue = AdmissionQueue(running, tokens)
        self.limit = tokens
        self.alive: list[Ticket] = []
        self.now = 0.0

    @rule(tokens=st.integers(1, 120), priority=st.integers(-2, 2), sequences=st.integers(1, 4))
    def offer(self, tokens: int, priority: int, sequences: int) -> None:
        self.now += 0.1
        before = self.queue.waiting_tokens
        try:
            ticket = self.queue.offer(tokens, sequences=sequences, priority=priority, now=self.now)
            self.alive.append(ticket)
        except QueueFull:
            assert before + tokens + REQUEST_OVERHEAD_TOKENS > self.limit
        else:
            assert before == 0 or self.queue.waiting_tokens <= self.limit

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.now += 0.1
        ticket = data.draw(st.sampled_from(self.alive))
        if ticket.admitted:
            self.queue.prefilled(ticket, self.now)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.alive) - 1))
        for admitted in self.queue.leave(self.alive.pop(index)):
            assert admitted in self.alive

    @invariant()
    def counts_add_up(self) -> None:
        self.queue.invariants()
        assert self.queue.running == sum(t.admitted for t in self.alive)
        assert self.queue.sequences == sum(t.sequences for t in self.alive if t.admitted)
        assert self.queue.waiting == sum(not t.admitted for t in self.alive)
        assert self.queue.waiting_tokens == sum(t.tokens for t in self.alive if not t.prefilled)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
