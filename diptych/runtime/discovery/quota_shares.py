"""Shares of the decode workers' KV memory among several gateways.

Each gateway admits requests within a quota of KV memory that it holds, so that all of them together never
admit more than the workers have. The quotas are written down in one place (quota_table.py), and a gateway
takes its own from what the others leave, four times a second. No request waits for that: it is admitted
against the quota that its gateway holds already.

**Taking.** A gateway asks for what its running and waiting requests need, and some room to start more at
once. It may take an equal share of the memory whenever that is free, and more only of what the others do not
want. It never gives back what running requests have reserved, so that quotas shrink as requests end.

**Not knowing.** While the table is out of reach a gateway keeps its quota. A table that lost its lines, or
that none could write for a while, may be short of gateways that live: until each of them has had the time
to write its line again, no quota grows, and old lines count. A gateway that alone is cut off from the
table is taken for gone after a lease, and the others may take its memory beside it: then preemption helps.

Pure; amounts are tokens of KV memory, times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LEASE_S = 3.0
"""A line that is older belongs to a gateway that is gone."""
SPARE_PARTS = 4
"""A gateway asks for one part in so many of an equal share beyond what it needs."""


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """Line of one gateway in the table: the tokens that it holds and wants, and when it said so."""

    held: int
    wanted: int
    written_at: float = 0.0


@dataclass(frozen=True, slots=True)
class QuotaTable:
    """Lines by gateway id; the time from which quotas may grow, and that of the last line."""

    lines: Mapping[str, QuotaLine]
    settled_at: float
    touched_at: float


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Tokens of KV memory that a gateway's running requests have reserved, and its waiting ones need.

    `capacity` is the memory of all decode workers; `quota` what the gateway holds now, None before its first
    turn at the table.
    """

    capacity: int
    reserved: int
    waiting: int
    quota: int | None


class Quota(NamedTuple):
    """KV memory that a gateway holds, and what that may grow to while the others keep what they have."""

    held: int
    attainable: int


def take_turn(
    gateway_id: str, need: MemoryNeed, table: QuotaTable | None, now: float
) -> tuple[Quota, QuotaTable]:
    """Return a gateway's quota from now on, and the table with its new line.

    Args:
        gateway_id: of the gateway whose turn it is.
        need: what it has and wants.
        table: as read; None: there is none.
        now: by the clock of the table, in seconds.
    """
    if table is None:
        table = QuotaTable({}, now if need.quota is None else now + LEASE_S, now)
    elif now - table.touched_at > LEASE_S / 2:
        table = QuotaTable(table.lines, now + LEASE_S, now)
    settled = now >= table.settled_at
    others = {
        name: line
        for name, line in table.lines.items()
        if name != gateway_id and (not settled or now - line.written_at <= LEASE_S)
    }
    equal = need.capacity // (len(others) + 1)
    free = max(need.capacity - sum(line.held for line in others.values()), 0)
    wanted = need.reserved + need.waiting + equal // SPARE_PARTS if others else need.capacity
    quota = min(wanted, _share(equal, free, others.values()))
    if not settled and need.quota is not None:
        quota = min(quota, need.quota)
    quota = max(quota, need.reserved)
    line = QuotaLine(quota, wanted, now)
    return Quota(quota, max(quota, equal, free)), QuotaTable(
        {**others, gateway_id: line}, table.settled_at, now
    )


def _share(equal: int, free: int, others: Iterable[QuotaLine]) -> int:
    """Return the most that a gateway may hold: an equal share if it is free, more if no other is owed it."""
    owed = sum(max(min(line.wanted, equal) - line.held, 0) for line in others)
    return max(free - owed, min(free, equal))
