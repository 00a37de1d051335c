"""The bounded queue: never more than allowed, nobody forgotten, in the right order, honest hints."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.admission.admission import (
    REQUEST_OVERHEAD_TOKENS,
    WINDOW_TOKENS,
    AdmissionQueue,
    MaxQueueDelay,
    Ticket,
)


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
    assert refused.value.retry_after_s == pytest.approx(5.0)  # then it would wait for five
    queue.offer(10, time_left_s=11.0, now=1.0)


def test_no_deadline_is_refused_while_nothing_waits_before_it() -> None:
    queue = AdmissionQueue(2, 1_000_000)
    slow = queue.offer(100, now=0.0)
    queue.prefilled(slow, 100.0)
    assert queue.offer(10_000, time_left_s=0.001, now=100.0).admitted


def measured(queue: AdmissionQueue, tokens: int = 84, stay_s: float = 1.0) -> float:
    """Forty requests, one after the other, at 1,000 tokens a second; returns the time."""
    now = 0.0
    for _ in range(40):
        ticket = queue.offer(tokens, now=now)
        now += (tokens + REQUEST_OVERHEAD_TOKENS) / 1000
        queue.prefilled(ticket, now)
        queue.leave(ticket, now + stay_s)
    return now


def flooded(queue: AdmissionQueue, now: float) -> tuple[list[Ticket], list[float]]:
    """A hundred requests at once: who is taken, and the hints of the others."""
    taken, hints = [], []
    for _ in range(100):
        try:
            taken.append(queue.offer(84, now=now))
        except QueueFull as refused:
            hints.append(refused.retry_after_s or 0.0)
    return taken, hints


def test_beyond_its_patience_a_queue_refuses_and_tells_when_there_is_room() -> None:
    queue = AdmissionQueue(1000, 1_000_000, patience=MaxQueueDelay(seconds=2.0))
    now = measured(queue)
    taken, hints = flooded(queue, now)
    assert len(taken) == pytest.approx(21, abs=2)  # two seconds of work, and the one before them
    assert hints[0] < 0.3
    # Each is told another time: who comes back then finds room for one.
    assert hints[10] - hints[0] == pytest.approx(10 * 0.1, rel=0.1)


def test_automatic_patience_is_a_number_of_average_prefills() -> None:
    for workers in (1, 2):
        queue = AdmissionQueue(1000, 1_000_000, patience=MaxQueueDelay(services=4))
        now = measured(queue)
        queue.resize(1000, workers, now)
        assert len(flooded(queue, now)[0]) == pytest.approx(4 * workers, abs=1.5)


def test_places_in_decode_batches_count_too() -> None:
    queue = AdmissionQueue(1000, 1_000_000, patience=MaxQueueDelay(seconds=5.0))
    now = measured(queue, stay_s=10.0)  # ten seconds each: a batch of ten ends one a second
    queue.resize(10, 1, now)
    taken, _ = flooded(queue, now)
    assert sum(ticket.admitted for ticket in taken) == 10
    assert len(taken) == pytest.approx(15, abs=1)
    for ticket in taken[:10]:
        queue.prefilled(ticket, now + 1)
    assert taken[10] in queue.leave(taken[0], now + 10)
    queue.invariants()


def test_more_places_admit_at_once() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    queue.resize(1, 1, 0.0)
    first, second = queue.offer(1, now=0), queue.offer(1, now=0)
    assert [first.admitted, second.admitted] == [True, False]
    assert queue.resize(2, 1, 0.0) == [second]


def test_prefill_workers_get_what_keeps_them_busy_and_the_rest_waits_here() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    tickets = [queue.offer(WINDOW_TOKENS // 4, now=0) for _ in range(10)]
    assert sum(ticket.admitted for ticket in tickets) == 3
    assert queue.prefilled(tickets[0], 1.0) == [tickets[3]]
    queue.invariants()


def test_every_prefill_worker_has_a_long_prompt_and_the_next_one() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    queue.resize(1000, 3, 0.0)
    tickets = [queue.offer(10 * WINDOW_TOKENS, now=0) for _ in range(10)]
    assert sum(ticket.admitted for ticket in tickets) == 6
    queue.invariants()


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = AdmissionQueue(1, 1_000_000)
    running = queue.offer(100, tenant="flood", now=0)
    for _ in range(50):
        queue.offer(500, tenant="flood", priority=9, now=0)
    quiet = queue.offer(100, tenant="quiet", now=0)
    order = [running]
    while quiet not in order:
        order += queue.leave(order[-1])
    assert len(order) <= 4


def test_a_flood_of_one_tenant_does_not_keep_another_out() -> None:
    size = 100 + REQUEST_OVERHEAD_TOKENS
    queue = AdmissionQueue(256, 40 * size)
    for _ in range(40):
        queue.offer(100, tenant="flood", now=0)
    queue.offer(100, tenant="quiet", now=0)
    with pytest.raises(QueueFull):
        queue.offer(100, tenant="flood", now=0)
    queue.invariants()


def test_a_flood_that_waits_for_places_counts_for_another_tenant_as_turns_allow() -> None:
    queue = AdmissionQueue(1000, 1_000_000, patience=MaxQueueDelay(seconds=5.0))
    now = measured(queue, stay_s=10.0)
    queue.resize(10, 1, now)
    flooded(queue, now)  # until those that wait would wait for five seconds
    with pytest.raises(QueueFull):
        queue.offer(84, now=now)
    queue.offer(84, tenant="quiet", now=now)


class QueueMachine(RuleBasedStateMachine):
    @initialize(running=st.integers(1, 3), tokens=st.integers(50, 4000), blocks=st.integers(8, 200))
    def begin(self, running: int, tokens: int, blocks: int) -> None:
        self.queue = AdmissionQueue(running, tokens)
        self.queue.kv.resize(blocks * 16, 16)
        self.limit = tokens
        self.alive: list[Ticket] = []
        self.now = 0.0

    @rule(
        tokens=st.integers(1, 1200),
        priority=st.integers(-2, 2),
        sequences=st.integers(1, 4),
        tenant=st.sampled_from("abc"),
        longest=st.integers(1, 1000),
    )
    def offer(self, tokens: int, priority: int, sequences: int, tenant: str, longest: int) -> None:
        self.now += 0.1
        before = self.queue.waiting_tokens
        try:
            ticket = self.queue.offer(
                tokens,
                max_tokens=longest,
                sequences=sequences,
                priority=priority,
                tenant=tenant,
                now=self.now,
            )
            self.alive.append(ticket)
        except QueueFull:
            assert before + tokens + REQUEST_OVERHEAD_TOKENS > self.limit
        else:
            assert before == 0 or self.queue.waiting_tokens <= 2 * self.limit

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
        for admitted in self.queue.leave(self.alive.pop(index), output_tokens=data.draw(st.integers(0, 400))):
            assert admitted in self.alive

    @invariant()
    def counts_add_up(self) -> None:
        self.queue.invariants()
        assert self.queue.running == sum(t.admitted for t in self.alive)
        assert self.queue.sequences == sum(t.sequences for t in self.alive if t.admitted)
        kv = self.queue.kv
        assert kv.reserved == sum(t.kv_tokens for t in self.alive if t.admitted)
        assert kv.capacity is not None
        assert kv.reserved <= kv.capacity or self.queue.running == 1
        assert all(t.admitted and t in self.alive for t in self.queue.woken())
        assert self.queue.waiting == sum(not t.admitted for t in self.alive)
        assert self.queue.waiting_tokens == sum(t.tokens for t in self.alive if not t.prefilled)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_list_is_taken_when_the_requests_that_nobody_waited_for_are_long_over() -> None:
    """Requests that leave before their first token are time in which nothing was done."""
    queue = AdmissionQueue(64, 100_000, patience=MaxQueueDelay(services=4))
    queue.prefilled(queue.offer(5000, now=0), 1)
    now = 1.0
    for _ in range(120):
        impatient = queue.offer(7000, now=now)
        now += 0.15
        queue.leave(impatient, now)
    now += 10
    batch = [queue.offer(500, now=now) for _ in range(32)]
    assert len(batch) == 32
