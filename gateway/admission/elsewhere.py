"""Service that tenants get at other gateways, as this gateway's queue charges it to them.

A tenant that comes through several gateways would get an equal share at each, and so several shares beside a
tenant that comes through one. Here what it was served elsewhere counts as if it had been served here:

**Tokens.** What a tenant got elsewhere is a debt, which it pays out of its turns in the queue (`FairQueue`).
Only tenants that compete for this gateway owe anything, and of what they got elsewhere only the part that
the least served of them did not get: no tenant profits from a time in which it did not wait. Debts fade.

**Places.** Sequences that run elsewhere count against a tenant's share of the places. Shares are those of
max-min fairness: the level up to which the places here fill the tenants' unequal sums.

Whatever it has elsewhere, a tenant keeps one part in `FLOOR_PARTS` of its turns and of the places: no request
waits forever at the gateway that it came to. Pure; times are seconds of a monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from typing import Final

FLOOR_PARTS: Final = 16
"""Parts of a turn, and of the places, of which a tenant keeps one whatever it has elsewhere."""
FADE_S: Final = 3.0
"""Time in which a debt falls to a third."""


class Elsewhere:
    """Tokens that tenants owe for what they got at other gateways, and the sequences that run there."""

    def __init__(self) -> None:
        self._debts: dict[str, float] = {}
        self._running: Mapping[str, int] = {}
        self._competed: set[str] = set()  # tenants that waited here since the last update
        self._updated_at: float | None = None

    def note_waiting(self, tenant: str) -> None:
        """Note that a request of ``tenant`` was not admitted at once."""
        self._competed.add(tenant)

    def update(
        self, served: Mapping[str, float], running: Mapping[str, int], waiting: Set[str], now: float
    ) -> float:
        """Charge what other gateways did since the last update, and return the tokens that were charged.

        Args:
            served: tokens by tenant, of all other gateways, since the last update.
            running: sequences by tenant that run there now.
            waiting: tenants with waiting requests here.
            now: the time.
        """
        elapsed = 0.0 if self._updated_at is None else max(now - self._updated_at, 0.0)
        kept = math.exp(-elapsed / FADE_S)
        competing = self._competed | waiting
        self._debts = {name: debt * kept for name, debt in self._debts.items() if debt * kept >= 1}
        charged = 0.0
        if len(competing) > 1:
            least = min(served.get(name, 0.0) for name in competing)
            for name in competing:
                if (more := served.get(name, 0.0) - least) > 0:
                    self._debts[name] = self._debts.get(name, 0.0) + more
                    charged += more
        self._running = {name: count for name, count in running.items() if count > 0}
        self._competed, self._updated_at = set(), now
        return charged

    def forget(self) -> None:
        """Forget all of it: this gateway counts only itself."""
        self._debts, self._running, self._updated_at = {}, {}, None

    def debt(self, tenant: str) -> float:
        """Return the tokens that ``tenant`` still owes."""
        return self._debts.get(tenant, 0.0)

    def pay(self, tenant: str, quantum: float) -> float:
        """Pay a debt out of the ``quantum`` of one turn, and return what is left of it, never nothing."""
        debt = self._debts.get(tenant)
        if debt is None:
            return quantum
        paid = min(debt, quantum - quantum / FLOOR_PARTS)
        if paid == debt:
            del self._debts[tenant]
        else:
            self._debts[tenant] = debt - paid
        return quantum - paid

    def shares(self, places: int, tenants: Collection[str]) -> Mapping[str, float]:
        """Return how many of ``places`` here each of ``tenants``, at least one, should have."""
        equal = places / len(tenants)
        if not self._running:
            return dict.fromkeys(tenants, equal)
        level = fair_level(places, [self._running.get(name, 0) for name in tenants])
        floor = min(max(places / FLOOR_PARTS, 1.0), equal)
        return {name: max(level - self._running.get(name, 0), floor) for name in tenants}


def fair_level(places: float, held: Collection[int]) -> float:
    """Return the level up to which ``places`` fill what is held, the least first (max-min fairness).

    It is the ``level`` at which the sum of ``level - one`` over all ``held`` below it is ``places``.
    """
    level, filled = 0.0, 0.0
    for count, one in enumerate(sorted(held), 1):
        if count > 1 and one >= level:
            break
        filled += one
        level = (places + filled) / count
    return level
