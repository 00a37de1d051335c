"""The gateway's bounded queue: how many requests run, how many tokens wait, who comes next, who is refused.

`AdmissionQueue` is pure: tickets in, decisions out, time as an argument. `gateway.admission.gate` calls those
whose turn it is. A request counts as running from its admission to its end, and its prompt counts as waiting
from its arrival to its first token, whether it waits here or at a prefill worker. Only so many tokens are
with the prefill workers as keep them busy, and only so many requests with the decode workers as their memory
holds to the end (`gateway.admission.kv_budget`). The rest waits here, where tenants get fair shares and where
a request still goes to the worker that is best when its turn comes.

A request is refused at the door when those before it would take longer than its deadline allows, or longer
than `MaxQueueDelay` does: under an overload those that are taken then wait about as long as at a high load, and
the others know at once. The rates are measured, so whatever slows the workers down (blocks that run out,
decode steps that share the machine) shortens the queue that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.access.caller import DEFAULT_TENANT
from gateway.admission.fair_queue import FairQueue
from gateway.admission.fair_shares import FairShares
from gateway.admission.kv_budget import KvBudget
from gateway.admission.throughput_estimator import ThroughputEstimator

REQUEST_OVERHEAD_TOKENS = 16  # no request is free, however short its prompt
WINDOW_REQUESTS = 2  # that a prefill worker has at least, however long: one runs, one is next
WINDOW_TOKENS = 1024  # that a prefill worker has before it at least: two steps of the default size,
WINDOW_S = 0.5  # or as many as it computes in this time
SMOOTHING = 0.05  # weight of one request in the averages
FIRST_RETRY_S = 1.0  # the hint while no rate was measured
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class MaxQueueDelay:
    """How long a request may have to wait, as predicted at its arrival.

    ``seconds``, or without them ``services`` times what one prefill of average length takes. At 80% of its
    capacity a queue with random arrivals has up to ten services in front of the unluckiest percent (M/D/1).
    Four are enough to keep the workers busy, and are gone soon after an overload ends.
    """

    seconds: float | None = None
    services: float = 4.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place in the queue."""

    tokens: int
    priority: int
    sequences: int = 1  # that the workers run for it at once
    tenant: str = DEFAULT_TENANT
    kv_tokens: int = 0  # of KV memory that it will probably come to hold
    admitted: bool = False
    prefilled: bool = False
    admitted_at: float = field(default=0.0, repr=False)


class AdmissionQueue:
    """Tenants by turns; of one tenant higher priority first, then first come, first served.

    Args:
        max_running: sequences that may be with the workers at once; a request counts as many as it makes. One
            request is always let through when nothing runs, however many that are.
        max_waiting_tokens: prompt tokens that may wait for their prefill, here and at the workers; see
            `FairShares` for whose. One request is always taken when nothing waits, however long it is.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting_tokens: int,
        *,
        patience: MaxQueueDelay | None = None,
    ) -> None:
        self._limit = self._max_running = max_running
        self._shares = FairShares(max_waiting_tokens)
        self._patience = patience or MaxQueueDelay(seconds=float("inf"))
        self._line: FairQueue[Ticket] = FairQueue()
        self._line_sequences = 0  # of those that wait here
        self._line_kv_tokens = 0  # likewise
        self._woken: list[Ticket] = []
        self._lines = 1  # prefill workers that compute side by side
        self._dead = False  # there are no workers at all
        self.rate = ThroughputEstimator()  # tokens prefilled
        self.kv = KvBudget()
        self._mean_tokens: float | None = None  # of a request
        self._mean_stay_s: float | None = None  # from admission to end
        self._promised_until = 0.0  # who was refused until now may come back until then
        self.running = 0  # requests
        self.sequences = 0  # of these
        self.dispatched_tokens = 0  # of those that wait, with the workers
        self._dispatched = 0  # requests whose tokens these are

    @property
    def waiting(self) -> int:
        """Requests that wait in the gateway."""
        return len(self._line)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts without a first token, here and at the workers."""
        return self._shares.total

    def resize(self, sequences: int, prefill_workers: int, now: float) -> list[Ticket]:
        """The workers can run so many sequences. Returns those that are admitted because of it."""
        was_dead, self._dead = self._dead, not (sequences and prefill_workers)
        if was_dead and not self._dead:
            self.rate.skip(now)
        self._limit = max(min(self._max_running, sequences), 1)
        self._lines = max(prefill_workers, 1)
        return self._admit(now)

    def woken(self) -> list[Ticket]:
        """Those that came in with the last `offer` beside its own ticket: a newcomer can change whose turn
        it is.
        """
        woken, self._woken = self._woken, []
        return woken

    def offer(
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
        """Take a request in; ``ticket.admitted`` says whether it may go on at once.

        ``prompt_tokens`` are those to compute: what is cached costs nothing. ``max_tokens`` bounds each
        output.

        Raises:
            QueueFull: its tenant may not add so many tokens, or it would wait for too long.
            DeadlineUnattainable: those before it would take longer than ``time_left_s``, as measured.
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
        self._line.push(ticket, tenant=tenant, priority=priority, cost=tokens)
        self._line_sequences += sequences
        self._line_kv_tokens += kv_tokens
        self._woken += [other for other in self._admit(now) if other is not ticket]
        return ticket

    def prefilled(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Its first token is out: its prompt no longer waits. Counts once. Returns those admitted then."""
        if ticket.prefilled:
            return []
        self._computed(ticket, ticket.tokens, now)
        return self._admit(now)

    def leave(self, ticket: Ticket, now: float | None = None, output_tokens: float = 0.0) -> list[Ticket]:
        """The request is over, in whatever state. Returns those that are admitted in its place.

        Without ``now`` nothing is learned of how long requests stay, nor of their outputs without
        ``output_tokens``, the length of one.
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
            self.kv.give_back(ticket.kv_tokens)
        elif ticket in self._line:
            self._line.discard(ticket)
            self._leave_line(ticket)
        return self._admit(now)

    def invariants(self) -> None:
        """Raises AssertionError when the counts do not add up; for tests and idle checks."""
        assert 0 <= self.running <= self.sequences or not self.sequences, "a request runs without a sequence"
        assert self.sequences <= self._max_running or self.running == 1, "too many sequences run"
        assert self.kv.reserved >= 0, "memory was given back twice"
        assert 0 <= self.dispatched_tokens <= self.waiting_tokens, "tokens were given back twice"
        head = self._line.head()
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
        """Until its prefill begins: the longest of the ways to a prefill worker, to a place in a batch and to
        memory.

        0 as long as nothing was measured: nobody is refused on a guess.
        """
        per_s = self.rate.per_s
        in_line = self.waiting_tokens - self.dispatched_tokens
        before = self._line.cost_before(tenant, tokens)
        prefill_s = 0.0 if per_s is None else (self.dispatched_tokens + before) / per_s
        if self._mean_stay_s is None or not self.running:
            return prefill_s
        share = min(before / in_line, 1.0) if in_line else 0.0  # of the line, in front of it
        over = self.sequences + share * self._line_sequences + sequences - self._limit
        stays = max(over / self._limit, self.kv.excess(share * self._line_kv_tokens + kv_tokens))
        return max(prefill_s, stays * self._mean_stay_s)

    def _allowed_s(self, tokens: int) -> float:
        if self._patience.seconds is not None:
            return self._patience.seconds
        per_s = self.rate.per_s
        if per_s is None:
            return float("inf")
        return self._patience.services * self._lines * (self._mean_tokens or tokens) / per_s

    def _hint_s(self, tokens: int, excess_s: float, now: float) -> float:
        """When there will be room for a request of these tokens, given that those who were refused before it
        come back when they were told to.
        """
        per_s = self.rate.per_s
        if per_s is None:
            return FIRST_RETRY_S
        at = max(now + excess_s, self._promised_until)
        self._promised_until = min(at + tokens / per_s, now + LONGEST_RETRY_S)
        return _bounded(at - now)

    def _admit(self, now: float | None) -> list[Ticket]:
        admitted = []
        while (ticket := self._line.head()) is not None:
            if not self._has_room(ticket):
                break  # those behind it do not pass: a large request would never come in
            self._line.pop()
            self._leave_line(ticket)
            ticket.admitted = True
            ticket.admitted_at = now or 0.0
            self.running += 1
            self.sequences += ticket.sequences
            self.kv.take(ticket.kv_tokens)
            self.dispatched_tokens += ticket.tokens
            self._dispatched += 1
            admitted.append(ticket)
        return admitted

    def _leave_line(self, ticket: Ticket) -> None:
        self._line_sequences -= ticket.sequences
        self._line_kv_tokens -= ticket.kv_tokens

    def _has_room(self, ticket: Ticket) -> bool:
        if not self.running:
            return True
        if self.sequences + ticket.sequences > self._limit or not self.kv.fits(ticket.kv_tokens):
            return False
        if self._dispatched < WINDOW_REQUESTS * self._lines:
            return True
        window = max(WINDOW_TOKENS * self._lines, WINDOW_S * (self.rate.per_s or 0.0))
        return self.dispatched_tokens + ticket.tokens <= window


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_RETRY_S), LONGEST_RETRY_S)
