"""`AdmissionQueue` with a clock, and a callback for each request that is admitted."""

from __future__ import annotations

from collections.abc import Callable

from gateway.access.access import DEFAULT_TENANT
from gateway.admission.capacity import Capacity
from gateway.admission.queue import AdmissionQueue, Ticket


class AdmissionGate:
    """Admission of all requests of one gateway."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float]) -> None:
        self.queue = queue
        self._clock = clock
        self._on_admitted: dict[Ticket, Callable[[], None]] = {}

    def enter(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int,
        sequences: int = 1,
        priority: int,
        tenant: str = DEFAULT_TENANT,
        time_left_s: float | None,
        on_admitted: Callable[[], None],
    ) -> Ticket:
        """Enqueue a request, as `AdmissionQueue.enqueue` does; `leave` must follow.

        ``on_admitted`` is called once, now or later, unless `leave` comes first.
        """
        ticket = self.queue.enqueue(
            prompt_tokens,
            max_tokens=max_tokens,
            sequences=sequences,
            priority=priority,
            tenant=tenant,
            time_left_s=time_left_s,
            now=self._clock(),
        )
        if ticket.admitted:
            on_admitted()
        else:
            self._on_admitted[ticket] = on_admitted
        self._call_back(self.queue.newly_admitted())
        return ticket

    def prefilled(self, ticket: Ticket) -> None:
        self._call_back(self.queue.prefilled(ticket, self._clock()))

    def leave(self, ticket: Ticket, output_tokens: float) -> None:
        """Give the place back. ``output_tokens``: of one output, on average."""
        self._on_admitted.pop(ticket, None)
        self._call_back(self.queue.leave(ticket, self._clock(), output_tokens))

    def resize(self, capacity: Capacity) -> None:
        """Set the capacity of the workers."""
        self.queue.kv.resize(capacity.kv_tokens, capacity.block_size)
        self._call_back(self.queue.resize(capacity.sequences, capacity.prefill_workers, self._clock()))

    def _call_back(self, admitted: list[Ticket]) -> None:
        for ticket in admitted:
            self._on_admitted.pop(ticket)()
