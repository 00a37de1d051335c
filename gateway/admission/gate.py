"""`AdmissionQueue` with a clock and a call for each request whose turn has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gateway.access.caller import DEFAULT_TENANT
from gateway.admission.admission import AdmissionQueue, Ticket


class Capacity(NamedTuple):
    """What the workers can take at once.

    ``kv_tokens`` is what all decode workers can hold, in blocks of ``block_size`` tokens; None = not known.
    """

    sequences: int
    prefill_workers: int
    kv_tokens: int | None = None
    block_size: int = 1


class AdmissionGate:
    """One for all requests of a gateway."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float]) -> None:
        self.queue = queue
        self._clock = clock
        self._calls: dict[Ticket, Callable[[], None]] = {}

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
        """As `AdmissionQueue.offer`. ``on_admitted`` is called once, now or later; `leave` is owed."""
        ticket = self.queue.offer(
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
            self._calls[ticket] = on_admitted
        self._call(self.queue.woken())
        return ticket

    def prefilled(self, ticket: Ticket) -> None:
        self._call(self.queue.prefilled(ticket, self._clock()))

    def leave(self, ticket: Ticket, output_tokens: float) -> None:
        """Give the place back; whoever comes next is called. ``output_tokens``: of one output, on average."""
        self._calls.pop(ticket, None)
        self._call(self.queue.leave(ticket, self._clock(), output_tokens))

    def resize(self, capacity: Capacity) -> None:
        """As `AdmissionQueue.resize`."""
        self.queue.kv.resize(capacity.kv_tokens, capacity.block_size)
        self._call(self.queue.resize(capacity.sequences, capacity.prefill_workers, self._clock()))

    def _call(self, admitted: list[Ticket]) -> None:
        for ticket in admitted:
            self._calls.pop(ticket)()
