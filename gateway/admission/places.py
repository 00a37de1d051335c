"""Division of the places for running sequences, between tenants and between first sequences and others.

Pure: what runs and what waits is read, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.admission.elsewhere import Elsewhere
from gateway.admission.fair_queue import FairQueue
from gateway.admission.running import RunningSequences
from gateway.admission.ticket import Ticket

RESERVE = 8  # one place in so many is for the first sequences of requests, and for tenants below their share
SMALLEST_SHARED = 4  # places; with fewer there is nothing to reserve


class Places:
    """The places of one gateway.

    Args:
        limit: sequences that may run at once.
        first: requests without a sequence so far.
        more: requests with a first token that may start more sequences.
        tenants: returns how many tenants the gateway's key file has.
    """

    def __init__(
        self,
        limit: int,
        running: RunningSequences,
        first: FairQueue[Ticket],
        more: FairQueue[Ticket],
        elsewhere: Elsewhere,
        tenants: Callable[[], int],
    ) -> None:
        self.limit = limit
        self._running = running
        self._first = first
        self._more = more
        self._elsewhere = elsewhere
        self._tenants = tenants

    @property
    def are_for_first_only(self) -> bool:
        """True where the places that are left are for first sequences."""
        return self._running.extras >= self._most_extras

    def head(self, queue: FairQueue[Ticket]) -> Ticket | None:
        """Return the first request of the tenants below their share, or else of those that may have more."""
        if not len(queue):
            return None
        held, waiting = self._running.by_tenant, [*queue.tenants]
        shares, most = self._shares(), self._most_of_one
        allowed = [tenant for tenant in waiting if held[tenant] < most]
        below = [tenant for tenant in allowed if held[tenant] < shares[tenant]]
        return queue.head(below) or queue.head(allowed)

    def at_least(self, ticket: Ticket) -> int:
        """Return how many sequences of a request start at first: a few share one prefill."""
        return ticket.sequences if ticket.together else min(ticket.sequences, max(self._reserve, 1))

    def room(self, ticket: Ticket) -> int:
        """Return how many sequences of a request may start now."""
        running = self._running
        free, left = self.limit - running.sequences, ticket.sequences - ticket.started
        if ticket.together:
            fits = free >= left and running.fits(ticket, left)
            return left if fits or not running.sequences else 0
        extras = self._most_extras - running.extras + (not ticket.running)
        share = self._most_of_one
        if self._others_wait(ticket.tenant):
            share = int(self._shares()[ticket.tenant])
        wanted = min(left, max(extras, 1), max(share - running.by_tenant[ticket.tenant], 1))
        count = min(wanted, free)
        if count < (1 if ticket.started else min(self.at_least(ticket), wanted)):
            return 0
        while count > 1 and not running.fits(ticket, count):
            count -= 1
        return count if running.fits(ticket, count) or not running.sequences else 0

    @property
    def _reserve(self) -> int:
        """Places that only first sequences, and tenants below their share, may take."""
        return max(self.limit // RESERVE, 1) if self.limit >= SMALLEST_SHARED else 0

    @property
    def _most_of_one(self) -> int:
        """Most sequences of a tenant that is alone."""
        alone = self._tenants() <= 1 and len(self._running.by_tenant.keys() | self._first.tenants) <= 1
        return self.limit if alone else self.limit - self._reserve

    @property
    def _most_extras(self) -> int:
        return self.limit - self._reserve - 1

    def _shares(self) -> Mapping[str, float]:
        """Return the sequences that each tenant which runs or waits here should have here."""
        tenants = self._running.by_tenant.keys() | self._first.tenants | self._more.tenants
        return self._elsewhere.shares(self.limit, tenants)

    def _others_wait(self, tenant: str) -> bool:
        return bool((self._first.tenants | self._more.tenants) - {tenant})
