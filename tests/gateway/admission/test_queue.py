"""Bounded queue: limits, order, no lost request, correct retry hints."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.admission.queue import REQUEST_OVERHEAD_TOKENS, WINDOW_TOKENS, AdmissionQueue
from gateway.admission.ticket import Ticket
from gateway.admission.wait import MaxQueueDelay


def test_queue_admits_by_priority_then_arrival() -> None:
    queue = AdmissionQueue(1, 10_000)
    first = queue.enqueue(10, now=0)
    low, high, late = (queue.enqueue(10, priority=p, now=0) for p in (0, 5, 5))
    assert first.admitted
    order = []
    ticket = first
    for _ in range(3):
        (ticket,) = queue.leave(ticket)
        order.append(ticket)
    assert order == [high, late, low]


def test_empty_queue_accepts_any_request_and_refuses_the_next_with_a_hint() -> None:
    queue = AdmissionQueue(8, 100)
    long = queue.enqueue(5000, now=0)
    assert long.admitted
    with pytest.raises(QueueFull) as refused:
        queue.enqueue(1, now=0)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    queue.prefilled(long, 1.0)
    assert queue.enqueue(1, now=1.0).admitted


def test_beam_search_counts_all_its_sequences_and_is_not_overtaken() -> None:
    queue = AdmissionQueue(4, 10_000)
    three = queue.enqueue(1, sequences=3, together=True, now=0)
    two = queue.enqueue(1, sequences=2, together=True, now=0)
    one = queue.enqueue(1, now=0)  # there is room, but not for the one before it
    assert [t.admitted for t in (three, two, one)] == [True, False, False]
    assert queue.leave(three) == [two, one]
    queue.invariants()


def test_beam_search_larger_than_the_limit_is_admitted_when_nothing_runs() -> None:
    queue = AdmissionQueue(4, 10_000)
    first = queue.enqueue(1, now=0)
    large = queue.enqueue(1, sequences=9, together=True, now=0)
    behind = queue.enqueue(1, now=0)
    assert queue.leave(first) == [large]
    assert not behind.admitted
    assert queue.leave(large) == [behind]
    queue.invariants()


def test_request_with_more_choices_than_places_leaves_room_for_others() -> None:
    queue = AdmissionQueue(72, 1_000_000)
    large = queue.enqueue(10, sequences=128, now=0)
    assert large.take_admitted() == tuple(range(63))  # one place in eight is for the first choices of others
    others = [queue.enqueue(10, now=0)]
    queue.prefilled(others[0], 0.1)
    queue.prefilled(large, 0.1)
    others += [queue.enqueue(10, now=0.2) for _ in range(9)]
    for other in others:
        queue.prefilled(other, 0.3)
    assert [other.admitted for other in others] == [True] * 9 + [False]
    queue.invariants()


def test_choices_beyond_the_places_start_as_others_end() -> None:
    queue = AdmissionQueue(8, 10_000)
    large = queue.enqueue(10, sequences=20, now=0)
    assert large.take_admitted() == tuple(range(7))
    assert queue.end_choice(large, 0, 0.1) == []  # before its first token the prompt is in no cache
    queue.prefilled(large, 0.2)
    assert large.take_admitted() == (7,)
    started = 8
    for choice in range(1, 13):
        assert queue.end_choice(large, choice, 1.0) == [large]
        assert large.take_admitted() == (started,)
        started += 1
        queue.invariants()
    for choice in range(13, 20):
        queue.end_choice(large, choice, 2.0)
    assert (queue.running, queue.sequences, large.started) == (0, 0, 20)
    queue.leave(large, 2.0)
    queue.invariants()


@pytest.mark.parametrize("places", [1, 2, 3, 4, 5])
def test_few_places_run_a_request_with_more_choices_to_its_end(places: int) -> None:
    queue = AdmissionQueue(places, 10_000)
    large = queue.enqueue(10, sequences=9, now=0)
    queue.prefilled(large, 0.1)
    for choice in range(9):
        assert choice in large.running
        queue.end_choice(large, choice, 1.0)
        queue.invariants()
    assert large.started == 9


def test_first_choices_and_further_choices_take_turns() -> None:
    queue = AdmissionQueue(8, 1_000_000)
    large = queue.enqueue(10, sequences=20, now=0)
    queue.prefilled(large, 0.1)
    single = queue.enqueue(10, now=0.1)
    queue.prefilled(single, 0.2)
    waiting = [queue.enqueue(10, now=0.2) for _ in range(3)]
    order = []
    for choice in range(4):
        for ticket in queue.end_choice(large, choice, 1.0):
            order.append(ticket)
            if ticket is not large:
                queue.prefilled(ticket, 1.0)
    assert order == [large, waiting[0], large, waiting[1]]


def test_choice_that_ends_gives_its_place_and_its_memory_back() -> None:
    queue = AdmissionQueue(8, 10_000)
    queue.kv.resize(1000 * 16, 16)
    two = queue.enqueue(32, max_tokens=16, sequences=2, now=0)
    assert (queue.sequences, queue.kv.reserved) == (2, 4 * 16)
    queue.prefilled(two, 0.1)
    queue.end_choice(two, 0, 0.5, 10)
    queue.end_choice(two, 0, 0.5, 10)  # twice is once
    assert (queue.sequences, queue.kv.reserved) == (1, 3 * 16)
    queue.leave(two, 1.0)
    queue.leave(two, 1.0)
    assert (queue.running, queue.sequences, queue.kv.reserved) == (0, 0, 0)


def test_tenant_above_its_share_of_what_runs_waits_for_those_below() -> None:
    queue = AdmissionQueue(8, 1_000_000)
    queue.resize(8, 8, 0.0)
    greedy = [queue.enqueue(10, tenant="greedy", now=0) for _ in range(20)]
    running = [ticket for ticket in greedy if ticket.admitted]
    modest = [queue.enqueue(10, tenant="modest", now=1) for _ in range(4)]
    for ticket in running:
        queue.leave(ticket, 2.0)
        queue.invariants()
    assert all(ticket.admitted for ticket in modest)
    assert sum(ticket.admitted and not ticket.over for ticket in greedy) == 4


def test_resize_while_a_request_waits_leaves_no_waiting_memory_behind() -> None:
    queue = AdmissionQueue(64, 1_000_000)
    queue.kv.resize(1000 * 16, 16)
    queue.resize(8, 1, 0.0)
    running = [queue.enqueue(10, max_tokens=16, now=0) for _ in range(8)]
    waiting = queue.enqueue(32, max_tokens=16, sequences=8, now=0)
    assert not waiting.admitted
    queue.resize(64, 8, 1.0)
    for ticket in (*running, waiting):
        queue.leave(ticket, 2.0)
        queue.invariants()


def test_tenant_alone_leaves_places_to_the_others_in_the_key_file() -> None:
    queue = AdmissionQueue(16, 1_000_000, tenants=lambda: 2)
    queue.resize(16, 16, 0.0)
    greedy = [queue.enqueue(10, tenant="greedy", now=0) for _ in range(20)]
    assert sum(ticket.admitted for ticket in greedy) == 14
    assert all(queue.enqueue(10, tenant="modest", now=1).admitted for _ in range(2))
    alone = AdmissionQueue(16, 1_000_000)
    alone.resize(16, 16, 0.0)
    assert sum(alone.enqueue(10, now=0).admitted for _ in range(20)) == 16


def test_waiting_tokens_up_to_the_bound_are_accepted() -> None:
    size = 50 + REQUEST_OVERHEAD_TOKENS
    queue = AdmissionQueue(8, 2 * size)
    queue.enqueue(50, now=0)
    queue.enqueue(50, now=0)
    with pytest.raises(QueueFull):
        queue.enqueue(1, now=0)


def test_unattainable_deadline_is_refused_on_arrival() -> None:
    queue = AdmissionQueue(1, 1_000_000)
    rate = queue.enqueue(1000 - REQUEST_OVERHEAD_TOKENS, now=0.0)
    queue.prefilled(rate, 1.0)  # 1,000 tokens a second
    queue.enqueue(10_000 - REQUEST_OVERHEAD_TOKENS, now=1.0)  # waits: ten seconds of work
    with pytest.raises(DeadlineUnattainable) as refused:
        queue.enqueue(10, time_left_s=5.0, now=1.0)
    assert refused.value.retry_after_s == pytest.approx(5.0)  # then it would wait for five
    queue.enqueue(10, time_left_s=11.0, now=1.0)


def test_deadline_is_not_refused_in_an_empty_queue() -> None:
    queue = AdmissionQueue(2, 1_000_000)
    slow = queue.enqueue(100, now=0.0)
    queue.prefilled(slow, 100.0)
    assert queue.enqueue(10_000, time_left_s=0.001, now=100.0).admitted


def measured(queue: AdmissionQueue, tokens: int = 84, stay_s: float = 1.0) -> float:
    """Forty requests, one after the other, at 1,000 tokens a second; returns the time."""
    now = 0.0
    for _ in range(40):
        ticket = queue.enqueue(tokens, now=now)
        now += (tokens + REQUEST_OVERHEAD_TOKENS) / 1000
        queue.prefilled(ticket, now)
        queue.leave(ticket, now + stay_s)
    return now


def flooded(queue: AdmissionQueue, now: float) -> tuple[list[Ticket], list[float]]:
    """Offer a hundred requests at once; return the accepted ones and the hints of the others."""
    taken, hints = [], []
    for _ in range(100):
        try:
            taken.append(queue.enqueue(84, now=now))
        except QueueFull as refused:
            hints.append(refused.retry_after_s or 0.0)
    return taken, hints


def test_max_queue_delay_refuses_with_the_time_of_room() -> None:
    queue = AdmissionQueue(1000, 1_000_000, max_delay=MaxQueueDelay(seconds=2.0))
    now = measured(queue)
    taken, hints = flooded(queue, now)
    assert len(taken) == pytest.approx(21, abs=2)  # two seconds of work, and the one before them
    assert hints[0] < 0.3
    # Each is told another time: who comes back then finds room for one.
    assert hints[10] - hints[0] == pytest.approx(10 * 0.1, rel=0.1)


def test_automatic_max_queue_delay_is_a_number_of_average_prefills() -> None:
    for workers in (1, 2):
        queue = AdmissionQueue(1000, 1_000_000, max_delay=MaxQueueDelay(services=4))
        now = measured(queue)
        queue.resize(1000, workers, now)
        assert len(flooded(queue, now)[0]) == pytest.approx(4 * workers, abs=1.5)


def test_predicted_wait_includes_decode_batches() -> None:
    queue = AdmissionQueue(1000, 1_000_000, max_delay=MaxQueueDelay(seconds=5.0))
    now = measured(queue, stay_s=10.0)  # ten seconds each: a batch of ten ends one a second
    queue.resize(10, 1, now)
    taken, _ = flooded(queue, now)
    assert sum(ticket.admitted for ticket in taken) == 10
    assert len(taken) == pytest.approx(15, abs=1)
    for ticket in taken[:10]:
        queue.prefilled(ticket, now + 1)
    assert taken[10] in queue.leave(taken[0], now + 10)
    queue.invariants()


def test_resize_to_more_sequences_admits_at_once() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    queue.resize(1, 1, 0.0)
    first, second = queue.enqueue(1, now=0), queue.enqueue(1, now=0)
    assert [first.admitted, second.admitted] == [True, False]
    assert queue.resize(2, 1, 0.0) == [second]


def test_dispatched_tokens_are_bounded_by_the_window() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    tickets = [queue.enqueue(WINDOW_TOKENS // 4, now=0) for _ in range(10)]
    assert sum(ticket.admitted for ticket in tickets) == 3
    assert queue.prefilled(tickets[0], 1.0) == [tickets[3]]
    queue.invariants()


def test_each_prefill_worker_gets_two_long_prompts() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    queue.resize(1000, 3, 0.0)
    tickets = [queue.enqueue(10 * WINDOW_TOKENS, now=0) for _ in range(10)]
    assert sum(ticket.admitted for ticket in tickets) == 6
    queue.invariants()


def test_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = AdmissionQueue(1, 1_000_000)
    running = queue.enqueue(100, tenant="flood", now=0)
    for _ in range(50):
        queue.enqueue(500, tenant="flood", priority=9, now=0)
    quiet = queue.enqueue(100, tenant="quiet", now=0)
    order = [running]
    while quiet not in order:
        order += queue.leave(order[-1])
    assert len(order) <= 4


def test_flood_of_one_tenant_does_not_lock_another_out() -> None:
    size = 100 + REQUEST_OVERHEAD_TOKENS
    queue = AdmissionQueue(256, 40 * size)
    for _ in range(40):
        queue.enqueue(100, tenant="flood", now=0)
    queue.enqueue(100, tenant="quiet", now=0)
    with pytest.raises(QueueFull):
        queue.enqueue(100, tenant="flood", now=0)
    queue.invariants()


def test_predicted_wait_counts_a_flood_by_turns() -> None:
    queue = AdmissionQueue(1000, 1_000_000, max_delay=MaxQueueDelay(seconds=5.0))
    now = measured(queue, stay_s=10.0)
    queue.resize(10, 1, now)
    flooded(queue, now)  # until those that wait would wait for five seconds
    with pytest.raises(QueueFull):
        queue.enqueue(84, now=now)
    queue.enqueue(84, tenant="quiet", now=now)


@pytest.mark.parametrize("gives_up", [False, True])
def test_time_in_which_no_worker_can_take_a_prompt_is_not_measured(gives_up: bool) -> None:
    """Seconds without an encode worker say nothing of the speed of prefill workers."""
    queue = AdmissionQueue(1000, 1_000_000, max_delay=MaxQueueDelay(seconds=12.0))
    now = measured(queue)
    lost = queue.enqueue(84, now=now)
    queue.stall(lost, now)
    queue.prefilled(queue.enqueue(84, now=now + 2), now + 2.1)  # another, which they can take
    back = now + 4
    if gives_up:
        queue.leave(lost, back)
    else:
        queue.resume(lost, back)
        queue.prefilled(lost, back + 0.1)
    assert queue.rate.per_s == pytest.approx(1000, rel=0.1)
    assert len(flooded(queue, back + 0.1)[0]) == 100
    queue.invariants()


def test_work_is_measured_from_its_admission_beside_stalled_requests() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    now = measured(queue)
    queue.resize(1, 1, now)
    queue.stall(queue.enqueue(84, now=now), now)
    waiting = [queue.enqueue(84, now=now) for _ in range(9)]  # for the place that it keeps
    queue.resize(10, 10, now + 2)
    for number, ticket in enumerate(waiting, 1):
        queue.prefilled(ticket, now + 2 + number / 10)
    assert queue.rate.per_s == pytest.approx(1000, rel=0.01)
    queue.invariants()


def test_stay_with_a_stall_is_not_learned() -> None:
    queue = AdmissionQueue(1, 1_000_000, max_delay=MaxQueueDelay(seconds=5.0))
    now = measured(queue)
    for _ in range(10):
        lost = queue.enqueue(84, now=now)
        queue.stall(lost, now)
        queue.resume(lost, now + 60)
        queue.prefilled(lost, now + 60.1)
        now += 61
        queue.leave(lost, now)
    queue.enqueue(84, now=now)
    queue.enqueue(84, now=now)  # its wait is that of one request, of a second


def test_stalled_prompts_do_not_hold_up_others() -> None:
    queue = AdmissionQueue(1000, 1_000_000)
    lost = [queue.enqueue(2000, now=0.0) for _ in range(5)]
    assert [ticket.admitted for ticket in lost] == [True, True, False, False, False]
    waiting = queue.enqueue(10, now=0.0)
    for ticket in lost:
        queue.stall(ticket, 0.0)  # each makes room for the next
        queue.invariants()
    assert waiting.admitted
    for ticket in lost:
        queue.resume(ticket, 1.0)
    assert not queue.enqueue(10, now=1.0).admitted  # they are with the workers again
    queue.invariants()


def test_places_of_prompts_that_wait_for_encode_workers_go_to_others() -> None:
    """Four places and the memory of four: requests of text run at once, and all go on with the worker."""
    queue = AdmissionQueue(4, 1_000_000)
    queue.kv.resize(4 * 112, 16)
    images = [queue.enqueue(84, max_tokens=20, now=0.0) for _ in range(6)]
    waiting = queue.enqueue(84, max_tokens=20, now=0.0)
    for ticket in images:
        queue.stall(ticket, 0.0, gives_place=True)
        queue.stall(ticket, 0.0, gives_place=True)  # no second time
        queue.invariants()
    assert queue.running == 1, "the one of text"
    assert queue.kv.reserved == waiting.kv_tokens
    texts = [waiting, *(queue.enqueue(84, max_tokens=20, now=0.0) for _ in range(5))]
    for ticket in texts[:4]:
        queue.prefilled(ticket, 0.5)
    assert [ticket.admitted for ticket in texts] == [True] * 4 + [False] * 2
    for ticket in images:
        queue.resume(ticket, 1.0)
        queue.invariants()
    assert queue.running == 10, "six came back"
    for ticket in [*images, texts[0]]:
        assert not texts[4].admitted
        queue.leave(ticket, 2.0)
        queue.invariants()
    assert (queue.running, texts[4].admitted, texts[5].admitted) == (4, True, False)
    assert queue.kv.reserved == sum(ticket.kv_tokens for ticket in texts[1:5])


def test_a_request_that_takes_its_places_back_lets_those_of_other_tenants_go_first() -> None:
    """Memory of 800 tokens, places of five: `b` waited behind a long prompt of `c`, which had too few."""
    for back in (True, False):
        queue = AdmissionQueue(5, 1_000_000)
        queue.kv.resize(50 * 16, 16)
        image = queue.enqueue(84, max_tokens=20, sequences=2, tenant="c", now=0.0)
        queue.stall(image, 0.0, gives_place=True)
        assert queue.enqueue(400, max_tokens=200, tenant="c", now=0.0).admitted
        long = queue.enqueue(400, max_tokens=1, tenant="c", now=0.0)
        short = queue.enqueue(20, max_tokens=1, tenant="b", now=0.0)
        assert queue.resume(image, 1.0) == [short] if back else not short.admitted, "or it waits"
        assert not long.admitted
        queue.invariants()


def test_places_of_prompts_that_wait_for_other_workers_stay_theirs() -> None:
    """The control: others of a pair may be away for all, which then wait in the order of their tenants."""
    queue = AdmissionQueue(4, 1_000_000)
    for _ in range(4):
        queue.stall(queue.enqueue(84, now=0.0), 0.0)
    assert not queue.enqueue(84, now=0.0).admitted
    queue.invariants()


class QueueMachine(RuleBasedStateMachine):
    @initialize(running=st.integers(1, 9), tokens=st.integers(50, 4000), blocks=st.integers(8, 200))
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
        together=st.booleans(),
    )
    def enqueue(
        self, tokens: int, priority: int, sequences: int, tenant: str, longest: int, together: bool
    ) -> None:
        self.now += 0.1
        before = self.queue.waiting_tokens
        try:
            ticket = self.queue.enqueue(
                tokens,
                max_tokens=longest,
                sequences=sequences,
                together=together,
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
    def stall(self, data: st.DataObject) -> None:
        self.now += 0.1
        ticket, gives_place = data.draw(st.sampled_from(self.alive)), data.draw(st.booleans())
        for admitted in self.queue.stall(ticket, self.now, gives_place=gives_place):
            assert admitted in self.alive

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.now += 0.1
        for admitted in self.queue.resume(data.draw(st.sampled_from(self.alive)), self.now):
            assert admitted in self.alive

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.alive) - 1))
        for admitted in self.queue.leave(self.alive.pop(index), output_tokens=data.draw(st.integers(0, 400))):
            assert admitted in self.alive

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end_choice(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.alive))
        if not ticket.running or not ticket.prefilled or ticket.together:
            return
        choice = data.draw(st.sampled_from(sorted(ticket.running)))
        for admitted in self.queue.end_choice(ticket, choice, self.now, data.draw(st.integers(0, 400))):
            assert admitted in self.alive
        if ticket.started == ticket.sequences and not ticket.running:
            self.queue.leave(ticket)
            self.alive.remove(ticket)

    @invariant()
    def counts_add_up(self) -> None:
        self.queue.invariants()
        assert self.queue.running == sum(bool(t.running) for t in self.alive)
        assert self.queue.sequences == sum(len(t.running) for t in self.alive)
        gave = sum(t.given is not None for t in self.alive)
        assert len(self.alive) == gave or self.queue.running, "nothing runs, and requests wait"
        kv = self.queue.kv
        assert kv.reserved == sum(t.kv_tokens for t in self.alive)
        assert kv.capacity is not None
        came_back = any(t.returned for t in self.alive)
        assert kv.reserved <= kv.capacity or self.queue.running == 1 or came_back
        assert all(t.admitted and t in self.alive for t in self.queue.newly_admitted())
        assert self.queue.waiting == sum(not t.admitted for t in self.alive)
        assert self.queue.waiting_tokens == sum(t.tokens for t in self.alive if not t.prefilled)
        assert self.queue.queued_tokens == sum(t.tokens for t in self.alive if not t.admitted)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_batch_is_accepted_after_abandoned_requests() -> None:
    """Requests that leave before their first token are time in which nothing was done."""
    queue = AdmissionQueue(64, 100_000, max_delay=MaxQueueDelay(services=4))
    queue.prefilled(queue.enqueue(5000, now=0), 1)
    now = 1.0
    for _ in range(120):
        impatient = queue.enqueue(7000, now=now)
        now += 0.15
        queue.leave(impatient, now)
    now += 10
    batch = [queue.enqueue(500, now=now) for _ in range(32)]
    assert len(batch) == 32
