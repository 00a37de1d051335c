"""Fairness between tenants: the order of waiting requests, and each tenant's share of a full queue.

`FairQueue` is deficit round robin (Shreedhar and Varghese, 1995): each turn a tenant is credited a quantum of
tokens, and its next request goes when the credit covers it. A tenant with long prompts, many requests or high
priorities therefore delays itself only: all others get the same tokens per second. What it gets at other
gateways it pays out of its turns (`gateway.admission.elsewhere`). Pure; costs are in prompt tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway.admission.elsewhere import Elsewhere

T = TypeVar("T", bound=Hashable)
QUANTUM = 512.0


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """Requests of one tenant, at least one, and the tokens it may still spend.

    ``has_turn``: it is its turn, and the quantum is in its credit.
    """

    heap: list[tuple[int, int, T]] = field(default_factory=list)  # its first entry waits, others may be over
    cost: float = 0.0  # of all waiting requests
    credit: float = 0.0
    has_turn: bool = False


class FairQueue(Generic[T]):
    """Deficit round robin over tenants; of one tenant higher priority first, then arrival.

    Items are hashable and each is in the queue once.

    Args:
        quantum: credit of a turn.
        elsewhere: what tenants owe for service elsewhere; None: nothing.
    """

    def __init__(self, quantum: float = QUANTUM, elsewhere: Elsewhere | None = None) -> None:
        self._quantum = quantum
        self._elsewhere = elsewhere or Elsewhere()
        self._tenants: OrderedDict[str, _TenantQueue[T]] = OrderedDict()  # in order of their turns
        self._waiting: dict[T, tuple[str, float]] = {}  # tenant and cost
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def push(self, item: T, *, tenant: str, priority: int, cost: float) -> None:
        own = self._tenants.setdefault(tenant, _TenantQueue())
        heapq.heappush(own.heap, (-priority, self._arrivals, item))
        own.cost += cost
        self._arrivals += 1
        self._waiting[item] = tenant, cost

    @property
    def tenants(self) -> Set[str]:
        """Tenants with an item in the queue."""
        return self._tenants.keys()

    def head(self, tenants: Collection[str] | None = None) -> T | None:
        """Return the next item of ``tenants`` (None: of all), or None if they have none.

        Repeated calls return the same one until it is popped or discarded, or its tenant's order changes.
        """
        wanted = [tenant for tenant in self._tenants if tenants is None or tenant in tenants]
        while wanted:
            tenant, own = next(iter(self._tenants.items()))
            if tenant not in wanted:
                self._tenants.move_to_end(tenant)  # without credit: it may not go now
                continue
            item = own.heap[0][2]
            cost = self._waiting[item][1]
            if len(wanted) == 1:
                own.credit = max(own.credit, cost)
            elif not own.has_turn:
                own.credit += self._elsewhere.pay(tenant, self._quantum)
                own.has_turn = True
            if own.credit >= cost:
                return item
            self._end_turn(tenant)
        return None

    def pop(self, tenants: Collection[str] | None = None) -> T:
        """Remove and return the head. Raises LookupError when there is none."""
        item = self.head(tenants)
        if item is None:
            raise LookupError("the queue is empty")
        tenant, cost = self._waiting[item]
        self._tenants[tenant].credit -= cost
        if self._tenants[tenant].credit <= 0:
            self._end_turn(tenant)
        self.discard(item)
        return item

    def discard(self, item: T) -> None:
        """Remove ``item``, if it is in the queue."""
        if item not in self._waiting:
            return
        tenant, cost = self._waiting.pop(item)
        own = self._tenants[tenant]
        own.cost -= cost
        while own.heap and own.heap[0][2] not in self._waiting:
            heapq.heappop(own.heap)
        if not own.heap:
            del self._tenants[tenant]  # and its credit: an idle tenant saves none

    def _end_turn(self, tenant: str) -> None:
        self._tenants[tenant].has_turn = False
        self._tenants.move_to_end(tenant)

    def cost_before(self, tenant: str, cost: float) -> float:
        """Estimate the cost served before a new request of ``tenant`` with ``cost``.

        That is all of the tenant's own, and of each other tenant's as much as its turns allow meanwhile.
        Turns in which it pays for service elsewhere are the others'.
        """
        own = self._tenants[tenant].cost if tenant in self._tenants else 0.0
        others = (other.cost for name, other in self._tenants.items() if name != tenant)
        turns = own + cost + self._elsewhere.debt(tenant)
        return own + sum(min(theirs, turns) for theirs in others)


class FairShares:
    """Prompt tokens that each tenant holds in a bounded queue, and the rule for adding to a full one.

    A tenant may fill the queue while it is alone. When the queue is full, a tenant with less than an equal
    share may still add a request and one with more may not: a flood does not lock other tenants out. The
    overshoot is gone before a tenant above its share may add again.

    Args:
        size: of the queue in tokens. It never holds more than twice as many, except for one request in an
            empty queue, which is always accepted.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[str, int] = {}  # by tenant; never 0
        self.total = 0

    def fits(self, tenant: str, tokens: int) -> bool:
        """Return whether ``tenant`` may add ``tokens``. Its first request may be longer than its share."""
        wanted = self.total + tokens
        if not self.total or wanted <= self._size:
            return True
        if wanted > 2 * self._size:
            return False
        held = self._held.get(tenant, 0)
        tenants = len(self._held) + (not held)
        return not held or held + tokens <= self._size / tenants

    def take(self, tenant: str, tokens: int) -> None:
        self._held[tenant] = self._held.get(tenant, 0) + tokens
        self.total += tokens

    def give_back(self, tenant: str, tokens: int) -> None:
        self._held[tenant] -= tokens
        self.total -= tokens
        if not self._held[tenant]:
            del self._held[tenant]
