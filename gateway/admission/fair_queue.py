"""Who comes next among those that wait: tenants take turns by cost; of one tenant higher priority first.

Deficit round robin (Shreedhar and Varghese, 1995): each turn a tenant is credited a quantum of tokens, and
its next request goes when the credit covers it. So a tenant with long prompts, many requests or high
priorities delays itself only: whoever else waits gets the same tokens a second. Pure; costs are in tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
QUANTUM = 512.0


@dataclass(slots=True)
class _Line(Generic[T]):
    """One tenant's requests, and the tokens it may still spend in this turn."""

    heap: list[tuple[int, int, T]] = field(default_factory=list)
    cost: float = 0.0  # of all that wait here
    credit: float = 0.0


class FairQueue(Generic[T]):
    """Items are told apart by identity or equality, as their hash says; each is in the queue once."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._quantum = quantum
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()  # the first one's turn it is
        self._waiting: dict[T, tuple[str, float]] = {}  # tenant and cost
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def push(self, item: T, *, tenant: str, priority: int, cost: float) -> None:
        line = self._lines.setdefault(tenant, _Line())
        heapq.heappush(line.heap, (-priority, self._arrivals, item))
        line.cost += cost
        self._arrivals += 1
        self._waiting[item] = tenant, cost

    def head(self) -> T | None:
        """Who is next; the same one until it is popped or discarded, or a tenant's own order changes."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            item = self._first(line)
            if item is None:
                del self._lines[tenant]  # and its credit: who waits for nothing saves nothing
                continue
            cost = self._waiting[item][1]
            if len(self._lines) == 1:
                line.credit = max(line.credit, cost)
            if line.credit >= cost:
                return item
            line.credit += self._quantum
            if line.credit < cost:
                self._lines.move_to_end(tenant)
        return None

    def pop(self) -> T:
        """Take the head out. Raises LookupError when nothing waits."""
        item = self.head()
        if item is None:
            raise LookupError("nobody waits")
        tenant, cost = self._waiting[item]
        self._lines[tenant].credit -= cost
        if len(self._lines) > 1 and self._lines[tenant].credit <= 0:
            self._lines.move_to_end(tenant)
        self.discard(item)
        return item

    def discard(self, item: T) -> None:
        """It does not wait any more; nothing happens if it did not."""
        tenant, cost = self._waiting.pop(item, ("", 0.0))
        if tenant in self._lines and cost:
            line = self._lines[tenant]
            line.cost -= cost
            if self._first(line) is None:
                del self._lines[tenant]

    def cost_before(self, tenant: str, cost: float) -> float:
        """About what is served before a new request of this cost: its tenant's own line, and as much of each
        other's as their turns allow meanwhile.
        """
        own = self._lines[tenant].cost if tenant in self._lines else 0.0
        others = (line.cost for name, line in self._lines.items() if name != tenant)
        return own + sum(min(theirs, own + cost) for theirs in others)

    def _first(self, line: _Line[T]) -> T | None:
        while line.heap:
            item = line.heap[0][2]
            if item in self._waiting:
                return item
            heapq.heappop(line.heap)
        return None
