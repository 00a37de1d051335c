"""The decision whether a worker should change its role, and which one. Pure.

A role is short where it needs more workers than it has. A change is worth its price where it lessens the
worse of the two shortages (needed over present) by `GAIN`: the way back would then have to gain as much
again, so that a load between two numbers of workers moves no worker to and fro. The same change has to be
worth it for `HOLD_S` on end. Of the role that gives, the worker with the least work goes, as that has to be
done again elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.attempt.types import TEXT_ROLES, Role
from gateway.worker_pool.role_demand import Wanted
from gateway.worker_pool.role_rules import RoleBounds, RoleView, objection, other, ready_workers

GAIN = 0.1
HOLD_S = 5.0


class RoleBalancer:
    """Decides over the looks at a fleet, one after the other; times are seconds of a monotonic clock."""

    def __init__(self, bounds: RoleBounds, *, hold_s: float = HOLD_S) -> None:
        self._bounds = bounds
        self._hold_s = hold_s
        self._gives: Role | None = None  # the role that has had too many since `_since`
        self._since = 0.0

    def decide(self, wanted: Wanted, workers: Sequence[RoleView], now: float) -> str | None:
        """Return the worker that should change to the other role; None where all should stay."""
        gives = giving_role(wanted, workers)
        if gives is not self._gives:
            self._gives, self._since = gives, now
        if gives is None or now - self._since < self._hold_s:
            return None
        for one in sorted(ready_workers(workers, gives), key=lambda view: (view.work, view.worker_id)):
            if not objection(workers, one.worker_id, self._bounds):
                return one.worker_id
        return None

    def forget(self) -> None:
        """Let the next change be worth it for the whole time from now on."""
        self._gives = None


def giving_role(wanted: Wanted, workers: Sequence[RoleView]) -> Role | None:
    """Return the role that should give a worker to the other one, without regard to bounds."""
    counts = {role: len(ready_workers(workers, role)) for role in TEXT_ROLES}
    if not all(counts.values()):
        return None
    needs = {Role.PREFILL: wanted.prefill, Role.DECODE: wanted.decode}
    shortages = {role: needs[role] / counts[role] for role in TEXT_ROLES}
    takes = max(TEXT_ROLES, key=lambda role: shortages[role])
    gives = other(takes)
    if shortages[takes] <= 1.0 or counts[gives] < 2:
        return None
    after = max(needs[takes] / (counts[takes] + 1), needs[gives] / (counts[gives] - 1))
    return gives if after <= (1 - GAIN) * shortages[takes] else None
