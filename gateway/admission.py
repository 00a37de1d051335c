"""The gateway's bounded queue: how many requests run, how many tokens wait, who comes next, who is refused.

`AdmissionQueue` is pure: tickets in, decisions out, time as an argument. `AdmissionGate` calls those whose
turn it is. A request counts as running from its admission to its end, and its prompt counts as waiting from
its arrival to its first token, whether it waits here or at a prefill worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from runtime.errors import DeadlineUnattainable, QueueFull

REQUEST_OVERHEAD_TOKENS = 16  # no request is free, however short its prompt
RATE_SMOOTHING = 0.3  # weight of the newest window in the measured rate
RATE_WINDOW_S = 0.25  # prefills end in batches: a rate over less time than this means nothing
FIRST_RETRY_S = 1.0  # the hint while no rate was measured
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place in the queue."""

    tokens: int
    priority: int
    sequences: int = 1  # that the workers run for it at once
    admitted: bool = False
    prefilled: bool = False


class AdmissionQueue:
    """Higher priority first, then first come, first served.

    Args:
        max_running: sequences that may be with the workers at once; a request counts as many as it makes. One
            request is always let through when nothing runs, however many that are.
        max_waiting_tokens: prompt tokens that may wait for their prefill, here and at the workers. One
            request is always taken when nothing waits, however long it is.
    """

    def __init__(self, max_running: int, max_waiting_tokens: int) -> None:
        self._max_running = max_running
        self._max_waiting_tokens = max_waiting_tokens
        self._heap: list[tuple[int, int, Ticket]] = []
        self._arrivals = 0
        self._waiting: set[Ticket] = set()  # not admitted
        self._tokens_per_s: float | None = None
        self._window_start = 0.0
        self._window_tokens = 0
        self.running = 0  # requests
        self.sequences = 0  # of these
        self.waiting_tokens = 0

    @property
    def waiting(self) -> int:
        """Requests that wait in the gateway."""
        return len(self._waiting)

    def offer(
        self,
        prompt_tokens: int,
        *,
        sequences: int = 1,
        priority: int = 0,
        time_left_s: float | None = None,
        now: float,
    ) -> Ticket:
        """Take a request in; ``ticket.admitted`` says whether it may go on at once.

        Raises:
            QueueFull: the tokens that wait would be more than allowed.
            DeadlineUnattainable: those before it would take longer than ``time_left_s``, as measured.
        """
        tokens = prompt_tokens + REQUEST_OVERHEAD_TOKENS
        if self.waiting_tokens and self.waiting_tokens + tokens > self._max_waiting_tokens:
            raise QueueFull(retry_after_s=self.retry_hint_s())
        ahead_s = self._drain_s()
        queued = not self._has_room(sequences)
        if queued and time_left_s is not None and ahead_s is not None and ahead_s > time_left_s:
            raise DeadlineUnattainable(retry_after_s=self.retry_hint_s())
        if not self.waiting_tokens:  # idle time is no measure of speed
            self._window_start, self._window_tokens = now, 0
        ticket = Ticket(tokens, priority, sequences)
        self.waiting_tokens += tokens
        self._waiting.add(ticket)
        heapq.heappush(self._heap, (-priority, self._arrivals, ticket))
        self._arrivals += 1
        self._admit()
        return ticket

    def prefilled(self, ticket: Ticket, now: float) -> None:
        """Its first token is out: its prompt no longer waits. Counts once."""
        if ticket.prefilled:
            return
        ticket.prefilled = True
        self.waiting_tokens -= ticket.tokens
        self._window_tokens += ticket.tokens
        elapsed = now - self._window_start
        if elapsed < RATE_WINDOW_S:
            return
        rate, old = self._window_tokens / elapsed, self._tokens_per_s
        self._tokens_per_s = rate if old is None else old + RATE_SMOOTHING * (rate - old)
        self._window_start, self._window_tokens = now, 0

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """The request is over, in whatever state. Returns those that are admitted in its place."""
        if not ticket.prefilled:
            ticket.prefilled = True
            self.waiting_tokens -= ticket.tokens
        if ticket.admitted:
            self.running -= 1
            self.sequences -= ticket.sequences
        self._waiting.discard(ticket)
        return self._admit()

    def retry_hint_s(self) -> float:
        """Seconds until what waits now is probably done."""
        drain = self._drain_s()
        return FIRST_RETRY_S if drain is None else min(max(drain, SHORTEST_RETRY_S), LONGEST_RETRY_S)

    def invariants(self) -> None:
        """Raises AssertionError when the counts do not add up; for tests and idle checks."""
        assert 0 <= self.running <= self.sequences or not self.sequences, "a request runs without a sequence"
        assert self.sequences <= self._max_running or self.running == 1, "too many sequences run"
        assert self.waiting_tokens >= 0, "tokens were given back twice"
        head = min((entry for entry in self._heap if entry[2] in self._waiting), default=None)
        assert head is None or not self._has_room(head[2].sequences), "there is room while requests wait"

    def _drain_s(self) -> float | None:
        return None if self._tokens_per_s is None else self.waiting_tokens / self._tokens_per_s

    def _admit(self) -> list[Ticket]:
        admitted = []
        while self._heap:
            ticket = self._heap[0][2]
            if ticket in self._waiting:  # else it left while it waited
                if not self._has_room(ticket.sequences):
                    break  # those behind it do not pass: a large request would never come in
                self._waiting.remove(ticket)
                ticket.admitted = True
                self.running += 1
                self.sequences += ticket.sequences
                admitted.append(ticket)
            heapq.heappop(self._heap)
        return admitted

    def _has_room(self, sequences: int) -> bool:
        return not self.running or self.sequences + sequences <= self._max_running


class AdmissionGate:
    """`AdmissionQueue` with a clock and a call for each request whose turn has come."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float]) -> None:
        self.queue = queue
        self._clock = clock
        self._calls: dict[Ticket, Callable[[], None]] = {}

    def enter(
        self,
        prompt_tokens: int,
        *,
        sequences: int = 1,
        priority: int,
        time_left_s: float | None,
        on_admitted: Callable[[], None],
    ) -> Ticket:
        """As `AdmissionQueue.offer`. ``on_admitted`` is called once, now or later; `leave` is owed."""
        now = self._clock()
        ticket = self.queue.offer(
            prompt_tokens, sequences=sequences, priority=priority, time_left_s=time_left_s, now=now
        )
        if ticket.admitted:
            on_admitted()
        else:
            self._calls[ticket] = on_admitted
        return ticket

    def prefilled(self, ticket: Ticket) -> None:
        self.queue.prefilled(ticket, self._clock())

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; whoever comes next is called."""
        self._calls.pop(ticket, None)
        for following in self.queue.leave(ticket):
            self._calls.pop(following)()
