"""The running sequences of admitted requests: their numbers, whose they are, and the KV memory they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gateway.admission.capacity import KvBudget
from gateway.admission.ticket import Ticket


class RunningSequences:
    """Count of the sequences that run.

    Attributes:
        requests: with a running sequence.
        sequences: that run.
        extras: of these, beyond the first of each request.
        returned: of these, that took back places that they had given.
        by_tenant: sequences that run; tenants without any are left out.
    """

    def __init__(self, kv: KvBudget) -> None:
        self._kv = kv
        self.requests = 0
        self.sequences = 0
        self.extras = 0
        self.returned = 0
        self.by_tenant: Counter[str] = Counter()

    def start(self, ticket: Ticket, count: int, now: float) -> None:
        """Start the next ``count`` sequences of a request."""
        first = ticket.started
        ticket.started += count
        self._change(ticket, ticket.running | dict.fromkeys(range(first, ticket.started), now))

    def stop(self, ticket: Ticket, choices: Sequence[int]) -> None:
        """End these sequences of a request, which run or have given their places."""
        if ticket.given is not None:
            ticket.given = {index: at for index, at in ticket.given.items() if index not in choices}
        self._change(ticket, {index: at for index, at in ticket.running.items() if index not in choices})

    def give(self, ticket: Ticket) -> None:
        """Give the places and the memory of a request's sequences to others."""
        given = ticket.running
        self._change(ticket, {})
        ticket.given, ticket.returned = given, False

    def take_back(self, ticket: Ticket) -> None:
        """Let the sequences of a request run again that gave their places, beyond the limit if need be."""
        if ticket.given is not None:
            given, ticket.given = ticket.given, None
            ticket.returned = True
            self._change(ticket, given)

    def fits(self, ticket: Ticket, more: int) -> bool:
        """Return whether there is KV memory for ``more`` sequences of a request."""
        return self._kv.fits(self._kv_tokens(ticket, len(ticket.running) + more) - ticket.kv_tokens)

    def invariants(self) -> None:
        """Raise AssertionError when the counts do not add up."""
        assert 0 <= self.requests <= self.sequences, "a request runs without a sequence"
        assert self.sequences == self.by_tenant.total(), "tenants' sequences do not add up"
        assert 0 <= self.extras <= self.sequences - self.requests, "too many sequences beyond the first"
        assert 0 <= self.returned <= self.sequences, "too many sequences have come back"
        assert self._kv.reserved >= 0, "memory was given back twice"

    def _change(self, ticket: Ticket, running: dict[int, float]) -> None:
        before, extras = len(ticket.running), ticket.extras
        ticket.running = running
        after = len(running)
        self.requests += (after > 0) - (before > 0)
        self.sequences += after - before
        self.extras += ticket.extras - extras
        self.returned += (after - before) * ticket.returned
        self.by_tenant[ticket.tenant] += after - before
        if not self.by_tenant[ticket.tenant]:
            del self.by_tenant[ticket.tenant]
        kv_tokens = self._kv_tokens(ticket, after)
        self._kv.reserve(kv_tokens - ticket.kv_tokens)
        ticket.kv_tokens = kv_tokens

    def _kv_tokens(self, ticket: Ticket, running: int) -> int:
        return self._kv.clipped(ticket.shared_kv + running * ticket.own_kv) if running else 0
