"""Bounded queue of the gateway: admission, waiting and refusal of requests.

`AdmissionQueue` is pure: tickets in, decisions out, time as an argument; `gateway.admission.gate` adds the
clock and the callbacks. Each sequence of a request counts as running from its admission to its end, whether
or not its client has read the output. A prompt counts as waiting from its arrival to its first token, whether
it waits here or at a prefill worker.

**Sequences start as room comes.** Those that find room with the request's first one share its prefill; the
others start when places become free, after the first token, when the prompt is in a prefix cache. Requests
that wait for their first sequence and requests that wait for more of them take turns. Some places
(`gateway.admission.places`) are for first sequences only: no request shuts the others out, however many
sequences it has.

**Stalls.** A prompt that no worker can take now, as when all encode workers are lost, does not count as one
that workers have: others pass it, and while nothing else is at work, no throughput is measured. One that
waits for encode workers alone gives its place and its memory to others, whose workers are all there. It takes
them back when it goes on, beyond the limits if need be. Its prompt counts in the bound of waiting tokens.

**Shares.** While several tenants wait, those below an equal share of the running sequences go first. Where
there are several tenants, one that is alone leaves a part to the others. What tenants get at other
gateways counts as well, as far as it is known (`gateway.admission.elsewhere`).

Prefill workers get only as many tokens as keep them busy, decode workers only as many requests as their
memory holds to the end (`gateway.admission.capacity`). The rest waits here, where tenants get fair shares and
where a request still goes to the worker that is best at its admission.

A request is refused on arrival when the requests before it would take longer than its deadline or than
`MaxQueueDelay` allows. Under an overload the accepted requests then wait about as long as at a high load, and
the others are refused at once (`gateway.admission.wait`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.access.access import DEFAULT_TENANT
from gateway.admission.capacity import KvBudget
from gateway.admission.dispatched import DispatchedPrompts
from gateway.admission.elsewhere import Elsewhere
from gateway.admission.fair_queue import FairQueue, FairShares
from gateway.admission.fair_share_lines import ServedHere
from gateway.admission.places import Places
from gateway.admission.running import RunningSequences
from gateway.admission.ticket import Ticket
from gateway.admission.wait import MaxQueueDelay, WaitEstimator

REQUEST_OVERHEAD_TOKENS = 16  # no request is free, however short its prompt
WINDOW_REQUESTS = 2  # at a prefill worker at least, however long: one runs, one is next
WINDOW_TOKENS = 1024  # at a prefill worker at least: two steps of the default size,
WINDOW_S = 0.5  # or as many as it computes in this time


class AdmissionQueue:
    """Admission queue: tenants take turns; of one tenant higher priority first, then arrival.

    Args:
        max_running: sequences that may be with the workers at once. One sequence, or one beam search, is
            always admitted when nothing runs.
        max_waiting_tokens: prompt tokens that may wait for their prefill, here and at the workers, shared
            as in `FairShares`. One request is always accepted when nothing waits, however long it is.
        max_delay: bound of the predicted wait; None: no bound.
        tenants: returns how many tenants the gateway's key file has.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting_tokens: int,
        *,
        max_delay: MaxQueueDelay | None = None,
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self._max_running = max_running
        self._shares = FairShares(max_waiting_tokens)
        self._wait = WaitEstimator(max_delay)
        self.served_here = ServedHere()
        self._elsewhere = Elsewhere()
        # Requests without a sequence so far.
        self._queue: FairQueue[Ticket] = FairQueue(elsewhere=self._elsewhere)
        self._more: FairQueue[Ticket] = (
            FairQueue()
        )  # requests with a first token that may start more sequences
        self._turn_of_more = False
        self._queued_kv_tokens = 0  # of the requests in `_queue`
        self._newly_admitted: list[Ticket] = []
        self._prefill_workers = 1
        self._dead = False  # no workers at all
        self.rate = self._wait.rate  # prompt tokens per second
        self.kv = KvBudget()
        self._running = RunningSequences(self.kv)
        self._places = Places(max_running, self._running, self._queue, self._more, self._elsewhere, tenants)
        self._prompts = DispatchedPrompts()

    @property
    def waiting(self) -> int:
        """Number of requests that wait in the gateway."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests with a running sequence."""
        return self._running.requests

    @property
    def sequences(self) -> int:
        """Number of sequences that run."""
        return self._running.sequences

    @property
    def running_of_tenants(self) -> Mapping[str, int]:
        """Sequences that run, by tenant; tenants without any are left out."""
        return self._running.by_tenant

    @property
    def dispatched_tokens(self) -> int:
        """Tokens of the prompts that workers have, without a first token so far."""
        return self._prompts.tokens

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts without a first token, here and at the workers."""
        return self._shares.total

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait here for admission."""
        return self.waiting_tokens - self.dispatched_tokens - self._prompts.stalled_tokens

    @property
    def waiting_kv_tokens(self) -> int:
        """Tokens of KV memory that the first sequences of the waiting requests need."""
        return self._queued_kv_tokens

    def resize(self, sequences: int, prefill_workers: int, now: float) -> list[Ticket]:
        """Set the capacity in sequences and the number of prefill workers; return the newly admitted."""
        was_dead, self._dead = self._dead, not (sequences and prefill_workers)
        if was_dead and not self._dead:
            self.rate.skip(now)
        self._places.limit = max(min(self._max_running, sequences), 1)
        self._prefill_workers = max(prefill_workers, 1)
        return self._admit(now)

    def set_quota(self, held: int, attainable: int, now: float) -> list[Ticket]:
        """Set this gateway's quota of KV memory (`KvBudget`), in tokens; return the newly admitted."""
        self.kv.quota, self.kv.attainable = held, attainable
        return self._admit(now)

    def charge_elsewhere(
        self, served: Mapping[str, int], running: Mapping[str, int], now: float
    ) -> tuple[float, list[Ticket]]:
        """Charge tenants for what other gateways did (`Elsewhere.update`), tokens and sequences by tenant.

        Return the tokens that were charged, and the newly admitted.
        """
        charged = self._elsewhere.update(served, running, self._queue.tenants, now)
        return charged, self._admit(now)

    def forget_elsewhere(self, now: float) -> list[Ticket]:
        """Count this gateway alone; return the newly admitted."""
        self._elsewhere.forget()
        return self._admit(now)

    def newly_admitted(self) -> list[Ticket]:
        """Return, once, the other tickets that `enqueue` admitted: an arrival can change whose turn it is.

        As in all lists of newly admitted tickets, `Ticket.take_admitted` has their sequences.
        """
        newly_admitted, self._newly_admitted = self._newly_admitted, []
        return newly_admitted

    def enqueue(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int = 0,
        sequences: int = 1,
        together: bool = False,
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
            together: none of them starts without the others.
            priority: higher ones come first within the tenant.
            tenant: the caller's.
            time_left_s: until the deadline; None: no deadline.
            now: the time, in seconds.

        Raises:
            QueueFull: the tenant may not add so many tokens, or the predicted wait is above `MaxQueueDelay`.
            DeadlineUnattainable: the predicted wait is longer than ``time_left_s``.
        """
        tokens = prompt_tokens + REQUEST_OVERHEAD_TOKENS
        shared_kv, own_kv = self.kv.parts(prompt_tokens, max_tokens, tenant)
        ticket = Ticket(tokens, priority, sequences, tenant, together, shared_kv, own_kv)
        wait_s = self._predicted_wait_s(ticket)
        if not self._shares.fits(tenant, tokens):
            raise QueueFull(self._wait.hint_s(tokens, wait_s, now))
        if time_left_s is not None and wait_s > time_left_s:
            raise DeadlineUnattainable(self._wait.hint_s(tokens, wait_s - time_left_s, now))
        if wait_s > (allowed_s := self._wait.allowed_s(tokens, self._prefill_workers)):
            raise QueueFull(self._wait.hint_s(tokens, wait_s - allowed_s, now))
        self._wait.learn_tokens(tokens)
        self._shares.take(tenant, tokens)
        if self._is_busy:
            self.rate.begin(now)
        self._queue.push(ticket, tenant=tenant, priority=priority, cost=tokens)
        # Kept: a resize, while it waits, changes how many sequences would start.
        ticket.queued_kv = self._first_kv(ticket)
        self._queued_kv_tokens += ticket.queued_kv
        self._newly_admitted += [other for other in self._admit(now) if other is not ticket]
        if not ticket.admitted:
            self._elsewhere.note_waiting(tenant)
        return ticket

    def stall(self, ticket: Ticket, now: float, *, gives_place: bool = False) -> list[Ticket]:
        """Note that no worker can take an admitted request, which has no token; return the newly admitted.

        ``gives_place``: others may have its places and memory until it resumes.
        """
        if ticket.prefilled or ticket.over or not ticket.admitted:
            return []
        if not ticket.stalled:
            self._prompts.stall(ticket)
        if gives_place and ticket.given is None:
            self._running.give(ticket)
            self._prompts.given += 1
        if not self._is_busy:
            self.rate.pause(now)
        return self._admit(now)

    def resume(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Note that workers have a request again. Return the newly admitted: with its places its tenant has
        more, and others may be next.
        """
        if not ticket.stalled:
            return []
        self._resume(ticket, now)
        return self._admit(now)

    def prefilled(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Note a request's first token, once: its prompt no longer waits. Return the newly admitted."""
        if ticket.prefilled:
            return []
        self._computed(ticket, ticket.tokens, now)
        if ticket.started < ticket.sequences and not ticket.over:
            self._more.push(
                ticket, tenant=ticket.tenant, priority=ticket.priority, cost=REQUEST_OVERHEAD_TOKENS
            )
        return self._admit(now)

    def end_choice(
        self, ticket: Ticket, choice: int, now: float | None = None, output_tokens: float = 0.0
    ) -> list[Ticket]:
        """Give back the place of one sequence, if it has one. Return the newly admitted.

        ``now`` updates the average stay, ``output_tokens`` the tenant's average length.
        """
        started_at = (ticket.running or ticket.given or {}).get(choice)
        if started_at is None or ticket.together:
            return []
        self._learn(ticket, started_at, now, output_tokens)
        self._running.stop(ticket, (choice,))
        return self._admit(now)

    def leave(self, ticket: Ticket, now: float | None = None, output_tokens: float = 0.0) -> list[Ticket]:
        """Remove a request that ended, in any state, once. Return the newly admitted.

        ``now`` and ``output_tokens`` (of one output): as in `end_choice`.
        """
        if ticket.over:
            return []
        ticket.over = True
        if ticket.running:
            self._learn(ticket, min(ticket.running.values()), now, output_tokens)
        if not ticket.prefilled:
            self._computed(ticket, 0, now)
        if ticket in self._queue:
            self._queue.discard(ticket)
            self._queued_kv_tokens -= ticket.queued_kv
        self._more.discard(ticket)
        self._running.stop(ticket, tuple(ticket.running))
        return self._admit(now)

    def invariants(self) -> None:
        """Raise AssertionError when the counts do not add up; for tests and idle checks."""
        self._running.invariants()
        admitted = self.sequences - self._running.returned
        assert admitted <= self._max_running or self.running == 1, "too many sequences run"
        self._prompts.invariants(self.waiting_tokens, self.running)
        assert len(self._queue) or not self._queued_kv_tokens, "nothing waits, and memory is waited for"
        assert self._next() is None, "there is room while requests wait"

    def _resume(self, ticket: Ticket, now: float | None) -> None:
        if not ticket.stalled:
            return
        if now is not None:
            if self.running == self._prompts.held_up:  # whatever waits, waited for these
                self.rate.skip(now)
            self.rate.begin(now)
        self._prompts.resume(ticket)
        self._running.take_back(ticket)

    def _learn(self, ticket: Ticket, started_at: float, now: float | None, output_tokens: float) -> None:
        if ticket.prefilled and now is not None and not ticket.has_stalled:
            self._wait.learn_stay(now - started_at)
        if output_tokens:
            self.kv.learn(ticket.tenant, output_tokens)

    def _first_kv(self, ticket: Ticket) -> int:
        """Return the KV memory that the first sequences of a request need, in tokens."""
        return ticket.shared_kv + self._places.at_least(ticket) * ticket.own_kv

    @property
    def _is_busy(self) -> bool:
        """True while workers have prompts, or hold up those that wait."""
        all_stall = bool(self._prompts.stalled) and self.running == self._prompts.held_up
        return self.waiting_tokens > self._prompts.stalled_tokens and not all_stall

    def _computed(self, ticket: Ticket, tokens: int, now: float | None) -> None:
        self._resume(ticket, now)
        ticket.prefilled = True
        self._shares.give_back(ticket.tenant, ticket.tokens)
        if ticket.admitted:
            self._prompts.remove(ticket)
        if now is not None:
            self.rate.done(tokens, now, more=self._is_busy)

    def _predicted_wait_s(self, ticket: Ticket) -> float:
        """Predict the seconds until a request's prefill: the longest of the waits for a prefill worker, for a
        place in a batch and for KV memory.

        0 while nothing was measured: no request is refused on a guess.
        """
        queued = self.queued_tokens
        before = self._queue.cost_before(ticket.tenant, ticket.tokens)
        prefill_s = self._wait.prefill_s(self.dispatched_tokens + before)
        if not (self._wait.stay_known and self.running):
            return prefill_s
        share = min(before / queued, 1.0) if queued else 0.0  # of the queue, before it
        turns = share * len(self._queue)
        if len(self._more):
            turns *= 2  # every other turn starts one more sequence of a request that runs
        over = self.sequences + turns + self._places.at_least(ticket) - self._places.limit
        kv_tokens = share * self._queued_kv_tokens + self.kv.clipped(self._first_kv(ticket))
        stays = max(over / self._places.limit, self.kv.excess(kv_tokens))
        return max(prefill_s, self._wait.places_s(stays))

    def _admit(self, now: float | None) -> list[Ticket]:
        admitted = []
        while (chosen := self._next()) is not None:
            ticket, count = chosen
            if ticket.started:
                self._turn_of_more = False
                if ticket.started + count == ticket.sequences:
                    self._more.discard(ticket)
            else:
                self._turn_of_more = True
                self._queue.pop({ticket.tenant})
                self._queued_kv_tokens -= ticket.queued_kv
                self.served_here.add(ticket.tenant, ticket.tokens)
                self._prompts.add(ticket)
                if now is not None:
                    self.rate.begin(now)  # it paused if all that ran had stalled
            self._running.start(ticket, count, now or 0.0)
            admitted.append(ticket)
        return admitted

    def _next(self) -> tuple[Ticket, int] | None:
        """Return the request whose turn it is and how many of its sequences may start; None without room."""
        first = self._places.head(self._queue)
        if first is not None and not self._may_dispatch(first):
            first = None  # it waits for a prefill worker, the others for a place
        more = self._places.head(self._more)
        if more is not None and more.running and self._places.are_for_first_only:
            more = None  # what is left is for first sequences
        turns = (more, first) if self._turn_of_more else (first, more)
        ticket = turns[0] or turns[1]
        if ticket is None:
            return None
        count = self._places.room(ticket)
        return (ticket, count) if count else None  # no other one passes it: it would never be admitted

    def _may_dispatch(self, ticket: Ticket) -> bool:
        if self._prompts.requests < WINDOW_REQUESTS * self._prefill_workers:
            return True
        window = max(WINDOW_TOKENS * self._prefill_workers, WINDOW_S * (self.rate.per_s or 0.0))
        return self.dispatched_tokens + ticket.tokens <= window
