"""`AdmissionQueue` with a clock, and a callback whenever choices of a request are admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from gateway.access.access import DEFAULT_TENANT
from gateway.admission.capacity import Capacity
from gateway.admission.queue import AdmissionQueue
from gateway.admission.ticket import Ticket

OnAdmitted = Callable[[tuple[int, ...]], None]
"""Receives the indices of the choices that may start."""


class AdmissionGate:
    """Admission of all requests of one gateway."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float]) -> None:
        self.queue = queue
        self._clock = clock
        self._on_admitted: dict[Ticket, OnAdmitted] = {}
        self._newly_admitted: deque[Ticket] = deque()
        self._calls_back = False

    def enter(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int,
        sequences: int = 1,
        together: bool = False,
        priority: int,
        tenant: str = DEFAULT_TENANT,
        time_left_s: float | None,
        on_admitted: OnAdmitted,
    ) -> Ticket:
        """Enqueue a request, as `AdmissionQueue.enqueue` does; `leave` must follow.

        ``on_admitted`` is called now or later, and again for the sequences that start later.
        """
        ticket = self.queue.enqueue(
            prompt_tokens,
            max_tokens=max_tokens,
            sequences=sequences,
            together=together,
            priority=priority,
            tenant=tenant,
            time_left_s=time_left_s,
            now=self._clock(),
        )
        self._on_admitted[ticket] = on_admitted
        self._call_back([*([ticket] if ticket.admitted else ()), *self.queue.newly_admitted()])
        return ticket

    def set_stalled(self, ticket: Ticket, stalled: bool, *, gives_place: bool = False) -> None:
        """Note whether a request waits for a worker that could take it, as `AdmissionQueue.stall` says."""
        now = self._clock()
        self._call_back(
            self.queue.stall(ticket, now, gives_place=gives_place)
            if stalled
            else self.queue.resume(ticket, now)
        )

    def prefilled(self, ticket: Ticket) -> None:
        self._call_back(self.queue.prefilled(ticket, self._clock()))

    def end_choice(self, ticket: Ticket, choice: int, output_tokens: float) -> None:
        """Give the place of one choice back. ``output_tokens``: of its output."""
        self._call_back(self.queue.end_choice(ticket, choice, self._clock(), output_tokens))

    def leave(self, ticket: Ticket, output_tokens: float) -> None:
        """Give all places back; no change after the first time. ``output_tokens``: of one output."""
        self._on_admitted.pop(ticket, None)
        self._call_back(self.queue.leave(ticket, self._clock(), output_tokens))

    def resize(self, capacity: Capacity) -> None:
        """Set the capacity of the workers."""
        self.queue.kv.resize(capacity.kv_tokens, capacity.block_size, capacity.window)
        self._call_back(self.queue.resize(capacity.sequences, capacity.prefill_workers, self._clock()))

    def set_quota(self, held: int, attainable: int) -> None:
        """Set the KV memory that this gateway may use, in tokens."""
        self._call_back(self.queue.set_quota(held, attainable, self._clock()))

    def charge_elsewhere(self, served: Mapping[str, int], running: Mapping[str, int]) -> float:
        """Charge tenants for what they got at other gateways; return the tokens that were charged."""
        charged, admitted = self.queue.charge_elsewhere(served, running, self._clock())
        self._call_back(admitted)
        return charged

    def forget_elsewhere(self) -> None:
        """Charge nothing for other gateways any more."""
        self._call_back(self.queue.forget_elsewhere(self._clock()))

    def _call_back(self, admitted: list[Ticket]) -> None:
        """Call back for these tickets, one after the other: a callback may cause the next admission."""
        self._newly_admitted.extend(admitted)
        if self._calls_back:
            return
        self._calls_back = True
        try:
            while self._newly_admitted:
                ticket = self._newly_admitted.popleft()
                choices = ticket.take_admitted()
                on_admitted = self._on_admitted.get(ticket)
                if choices and on_admitted is not None:
                    on_admitted(choices)
        finally:
            self._calls_back = False
