"""Bounded queue of the gateway: admission, waiting and refusal of requests.

`AdmissionQueue` is pure: tickets in, decisions out, time as an argument; `gateway.admission.gate` adds the
clock and the callbacks. A request counts as running from its admission to its end. Its prompt counts as
waiting from its arrival to its first token, whether it waits here or at a prefill worker.

Prefill workers get only as many tokens as keep them busy, decode workers only as many requests as their
memory holds to the end (`gateway.admission.capacity`). The rest waits here, where tenants get fair shares and
where a request still goes to the worker that is best at its admission.

A request is refused on arrival when the requests before it would take longer than its deadline or than
`MaxQueueDelay` allows. Under an overload the accepted requests then wait about as long as at a high load, and
the others are refused at once. The rates are measured: whatever slows the workers down (blocks that run out,
decode steps that share the machine) shortens the queue that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.access.access import DEFAULT_TENANT
from gateway.admission.capacity import KvBudget, ThroughputEstimator
from gateway.admission.fair_queue import FairQueue, FairShares

REQUEST_OVERHEAD_TOKENS = 16  # no request is free, however short its prompt
WINDOW_REQUESTS = 2  # at a prefill worker at least, however long: one runs, one is next
WINDOW_TOKENS = 1024  # at a prefill worker at least: two steps of the default size,
WINDOW_S = 0.5  # or as many as it computes in this time
SMOOTHING = 0.05  # weight of one request in the averages
FIRST_RETRY_S = 1.0  # the retry hint while no rate was measured
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class MaxQueueDelay:
    """Bound of a request's wait, as predicted at its arrival.

    ``seconds``, or if None ``services`` times the duration of one prefill of average length. At 80% of its
    capacity a queue with random arrivals has up to ten services before the unluckiest percent (M/D/1).
    Four keep the workers busy and are gone soon after an overload ends.
    """

    seconds: float | None = None
    services: float = 4.0


@dataclass(slots=True, eq=False)
class Ticket:
    """Place of one request in the queue."""

    tokens: int
    priority: int
    sequences: int = 1  # computed side by side
    tenant: str = DEFAULT_TENANT
    kv_tokens: int = 0  # of KV memory, probably held at its end
    admitted: bool = False
    prefilled: bool = False
    admitted_at: float = field(default=0.0, repr=False)


class AdmissionQueue:
    """Admission queue: tenants take turns; of one tenant higher priority first, then arrival.

    Args:
        max_running: sequences that may be with the workers at once; a request counts with all of its own. One
            request is always admitted when nothing runs, however many sequences it has.
        max_waiting_tokens: prompt tokens that may wait for their prefill, here and at the workers, shared
            as in `FairShares`. One request is always accepted when nothing waits, however long it is.
        max_delay: bound of the predicted wait; None: no bound.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting_tokens: int,
        *,
        max_delay: MaxQueueDelay | None = None,
    ) -> None:
        self._limit = self._max_running = max_running
        self._shares = FairShares(max_waiting_tokens)
        self._max_delay = max_delay or MaxQueueDelay(seconds=float("inf"))
        self._queue: FairQueue[Ticket] = FairQueue()
        self._queued_sequences = 0  # of requests that wait here
        self._queued_kv_tokens = 0  # likewise
        self._newly_admitted: list[Ticket] = []
        self._prefill_workers = 1
        self._dead = False  # no workers at all
        self.rate = ThroughputEstimator()  # prompt tokens per second
        self.kv = KvBudget()
        self._mean_tokens: float | None = None  # of a request
        self._mean_stay_s: float | None = None  # from admission to end
        self._promised_until = 0.0  # retry hints given so far end then
        self.running = 0  # requests
        self.sequences = 0  # of the running requests
        self.dispatched_tokens = 0  # of the waiting tokens, those at the workers
        self._dispatched = 0  # requests whose tokens these are

    @property
    def waiting(self) -> int:
        """Number of requests that wait in the gateway."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts without a first token, here and at the workers."""
        return self._shares.total

    def resize(self, sequences: int, prefill_workers: int, now: float) -> list[Ticket]:
        """Set the capacity in sequences and the number of prefill workers; return the newly admitted."""
        was_dead, self._dead = self._dead, not (sequences and prefill_workers)
        if was_dead and not self._dead:
            self.rate.skip(now)
        self._limit = max(min(self._max_running, sequences), 1)
        self._prefill_workers = max(prefill_workers, 1)
        return self._admit(now)

    def newly_admitted(self) -> list[Ticket]:
        """Return, once, the other tickets that `enqueue` admitted: an arrival can change whose turn it is."""
        newly_admitted, self._newly_admitted = self._newly_admitted, []
        return newly_admitted

    def enqueue(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int = 0,
        sequences: int = 1,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        time_left_s: float | None = None,
        now: float,
    ) -> Ticket:
        """Add a request and return its ticket, which is ``admitted`` already if it may run at once.

        Args:
            prompt_tokens: those to compute, without the cached ones.
            max_tokens: bound of each output.
            sequences: outputs computed side by side.
            priority: higher ones come first within the tenant.
            tenant: the caller's.
            time_left_s: until the deadline; None: no deadline.
            now: the time, in seconds.

        Raises:
            QueueFull: the tenant may not add so many tokens, or the predicted wait is above `MaxQueueDelay`.
            DeadlineUnattainable: the predicted wait is longer than ``time_left_s``.
        """
        tokens = prompt_tokens + REQUEST_OVERHEAD_TOKENS
        kv_tokens = self.kv.need(prompt_tokens, max_tokens, sequences, tenant)
        wait_s = self._predicted_wait_s(tokens, sequences, kv_tokens, tenant)
        if not self._shares.fits(tenant, tokens):
            raise QueueFull(self._hint_s(tokens, wait_s, now))
        if time_left_s is not None and wait_s > time_left_s:
            raise DeadlineUnattainable(self._hint_s(tokens, wait_s - time_left_s, now))
        if wait_s > (allowed_s := self._allowed_s(tokens)):
            raise QueueFull(self._hint_s(tokens, wait_s - allowed_s, now))
        mean = self._mean_tokens
        self._mean_tokens = tokens if mean is None else mean + SMOOTHING * (tokens - mean)
        self.rate.begin(now)
        ticket = Ticket(tokens, priority, sequences, tenant, kv_tokens)
        self._shares.take(tenant, tokens)
        self._queue.push(ticket, tenant=tenant, priority=priority, cost=tokens)
        self._queued_sequences += sequences
        self._queued_kv_tokens += kv_tokens
        self._newly_admitted += [other for other in self._admit(now) if other is not ticket]
        return ticket

    def prefilled(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Note a request's first token, once: its prompt no longer waits. Return the newly admitted."""
        if ticket.prefilled:
            return []
        self._computed(ticket, ticket.tokens, now)
        return self._admit(now)

    def leave(self, ticket: Ticket, now: float | None = None, output_tokens: float = 0.0) -> list[Ticket]:
        """Remove a request that ended, in any state. Return the newly admitted.

        ``now`` updates the average stay, ``output_tokens`` (of one output) the tenant's average length.
        """
        if ticket.prefilled and now is not None:
            stay, mean = now - ticket.admitted_at, self._mean_stay_s
            self._mean_stay_s = stay if mean is None else mean + SMOOTHING * (stay - mean)
        if output_tokens:
            self.kv.learn(ticket.tenant, output_tokens)
        if not ticket.prefilled:
            self._computed(ticket, 0, now)
        if ticket.admitted:
            self.running -= 1
            self.sequences -= ticket.sequences
            self.kv.release(ticket.kv_tokens)
        elif ticket in self._queue:
            self._queue.discard(ticket)
            self._leave_queue(ticket)
        return self._admit(now)

    def invariants(self) -> None:
        """Raise AssertionError when the counts do not add up; for tests and idle checks."""
        assert 0 <= self.running <= self.sequences or not self.sequences, "a request runs without a sequence"
        assert self.sequences <= self._max_running or self.running == 1, "too many sequences run"
        assert self.kv.reserved >= 0, "memory was given back twice"
        assert 0 <= self.dispatched_tokens <= self.waiting_tokens, "tokens were given back twice"
        head = self._queue.head()
        assert head is None or not self._has_room(head), "there is room while requests wait"

    def _computed(self, ticket: Ticket, tokens: int, now: float | None) -> None:
        ticket.prefilled = True
        self._shares.give_back(ticket.tenant, ticket.tokens)
        if ticket.admitted:
            self.dispatched_tokens -= ticket.tokens
            self._dispatched -= 1
        if now is not None:
            self.rate.done(tokens, now, more=self.waiting_tokens > 0)

    def _predicted_wait_s(self, tokens: int, sequences: int, kv_tokens: int, tenant: str) -> float:
        """Predict the seconds until a request's prefill: the longest of the waits for a prefill worker, for a
        place in a batch and for KV memory.

        0 while nothing was measured: no request is refused on a guess.
        """
        per_s = self.rate.per_s
        queued = self.waiting_tokens - self.dispatched_tokens
        before = self._queue.cost_before(tenant, tokens)
        prefill_s = 0.0 if per_s is None else (self.dispatched_tokens + before) / per_s
        if self._mean_stay_s is None or not self.running:
            return prefill_s
        share = min(before / queued, 1.0) if queued else 0.0  # of the queue, before it
        over = self.sequences + share * self._queued_sequences + sequences - self._limit
        stays = max(over / self._limit, self.kv.excess(share * self._queued_kv_tokens + kv_tokens))
        return max(prefill_s, stays * self._mean_stay_s)

    def _allowed_s(self, tokens: int) -> float:
        if self._max_delay.seconds is not None:
            return self._max_delay.seconds
        per_s = self.rate.per_s
        if per_s is None:
            return float("inf")
        return self._max_delay.services * self._prefill_workers * (self._mean_tokens or tokens) / per_s

    def _hint_s(self, tokens: int, excess_s: float, now: float) -> float:
        """Return the seconds until there is room for ``tokens``, if refused clients retry at their hints."""
        per_s = self.rate.per_s
        if per_s is None:
            return FIRST_RETRY_S
        at = max(now + excess_s, self._promised_until)
        self._promised_until = min(at + tokens / per_s, now + LONGEST_RETRY_S)
        return _bounded(at - now)

    def _admit(self, now: float | None) -> list[Ticket]:
        admitted = []
        while (ticket := self._queue.head()) is not None:
            if not self._has_room(ticket):
                break  # no other one passes it: a large request would never be admitted
            self._queue.pop()
            self._leave_queue(ticket)
            ticket.admitted = True
            ticket.admitted_at = now or 0.0
            self.running += 1
            self.sequences += ticket.sequences
            self.kv.reserve(ticket.kv_tokens)
            self.dispatched_tokens += ticket.tokens
            self._dispatched += 1
            admitted.append(ticket)
        return admitted

    def _leave_queue(self, ticket: Ticket) -> None:
        self._queued_sequences -= ticket.sequences
        self._queued_kv_tokens -= ticket.kv_tokens

    def _has_room(self, ticket: Ticket) -> bool:
        if not self.running:
            return True
        if self.sequences + ticket.sequences > self._limit or not self.kv.fits(ticket.kv_tokens):
            return False
        if self._dispatched < WINDOW_REQUESTS * self._prefill_workers:
            return True
        window = max(WINDOW_TOKENS * self._prefill_workers, WINDOW_S * (self.rate.per_s or 0.0))
        return self.dispatched_tokens + ticket.tokens <= window


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_RETRY_S), LONGEST_RETRY_S)
