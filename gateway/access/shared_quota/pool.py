"""Pool of one API key's quota, of which gateways take slices.

The pool has a token bucket for requests a minute, one for tokens a minute, and the places of concurrent
requests. What a gateway has taken is gone from the pool until it brings it back, so that all of them together
never have more than the quota.

**Taking.** A gateway gets what its waiting requests need, and something to spare for the next ones: at most
the rest of the pool, divided by twice the number of gateways. Where little is left that is nothing: the last
requests of a minute go to whichever gateway they come to.

**Places.** A gateway that dies brings nothing back. Its part of a bucket fills again by itself; its places
are free when its line is older than `LEASE_S`. A table that lost its lines, or that none could write for a
while, may be short of gateways that live: until each has had the time to write its line again, no gateway
gets more places than it has, and old lines count.

Pure; times are seconds of the table's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.access.quota import MINUTE_S, Quota

LEASE_S: Final = 3.0
"""A line of places that is older belongs to a gateway that is gone."""


@dataclass(frozen=True, slots=True)
class BucketLevel:
    """Level of a token bucket, below 0 where it is overdrawn, and when it had it."""

    amount: float
    at: float


@dataclass(frozen=True, slots=True)
class SlotLine:
    """Places that a gateway holds, and when it said so."""

    held: int
    written_at: float


@dataclass(frozen=True, slots=True)
class PoolTable:
    """Record of a key's pool, without a bucket or lines where the quota has no such limit."""

    requests: BucketLevel | None
    tokens: BucketLevel | None
    lines: Mapping[str, SlotLine]
    settled_at: float
    """Time from which gateways may get more places than they have."""
    touched_at: float


@dataclass(frozen=True, slots=True)
class SliceAsk:
    """Request of a gateway to a bucket.

    `need` is for requests that wait, `spare` for those to come, `back` unused, `debt` used without having
    been taken. `known` is the level that the gateway expects; None before its first answer.
    """

    need: float = 0.0
    spare: float = 0.0
    back: float = 0.0
    debt: float = 0.0
    known: float | None = None


@dataclass(frozen=True, slots=True)
class SliceGrant:
    """Amount that a gateway got, and what is left in the bucket."""

    amount: float
    left: float


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """Places that running requests keep, and those that waiting ones need; `held`: None before any answer."""

    running: int
    need: int
    held: int | None


@dataclass(frozen=True, slots=True)
class PoolAsk:
    """Request of a gateway to a key's pool; None where the quota has no such limit."""

    requests: SliceAsk | None = None
    tokens: SliceAsk | None = None
    slots: SlotAsk | None = None


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """Answer to a `PoolAsk`, member by member."""

    requests: SliceGrant | None = None
    tokens: SliceGrant | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a gateway at the table, its time, and the number of gateways."""

    gateway_id: str
    now: float
    gateways: int = field(default=1)


def take_slice(
    quota: Quota, ask: PoolAsk, table: PoolTable | None, turn: Turn
) -> tuple[PoolGrant, PoolTable]:
    """Return what a gateway gets, and the table afterwards.

    Args:
        quota: of the key.
        ask: what the gateway has and wants.
        table: as read; None: there is none, as before the key's first use.
        turn: whose it is.
    """
    buckets = (None, None) if table is None else (table.requests, table.tokens)
    requests, requests_after = _take_of_bucket(quota.requests_per_minute, ask.requests, buckets[0], turn)
    tokens, tokens_after = _take_of_bucket(quota.tokens_per_minute, ask.tokens, buckets[1], turn)
    settled_at = _settled_at(ask.slots, table, turn)
    lines = dict(table.lines) if table is not None else {}
    slots = None
    if quota.concurrent_requests is not None and ask.slots is not None:
        slots, lines = _take_slots(quota.concurrent_requests, ask.slots, lines, turn, turn.now >= settled_at)
    return (
        PoolGrant(requests, tokens, slots),
        PoolTable(requests_after, tokens_after, lines, settled_at, turn.now),
    )


def _take_of_bucket(
    per_minute: int | None, ask: SliceAsk | None, before: BucketLevel | None, turn: Turn
) -> tuple[SliceGrant | None, BucketLevel | None]:
    if per_minute is None or ask is None:
        return None, None
    if before is None:  # a table that was lost is as full as the one that remembers it says
        amount = float(per_minute) if ask.known is None else ask.known
    else:
        amount = before.amount + max(turn.now - before.at, 0.0) * per_minute / MINUTE_S
    amount = min(amount + ask.back, per_minute) - ask.debt
    granted = math.floor(min(max(amount, 0.0), ask.need))
    rest = max(amount - granted, 0.0)
    granted += math.floor(min(ask.spare, rest / (2 * turn.gateways)))
    return SliceGrant(granted, amount - granted), BucketLevel(amount - granted, turn.now)


def _settled_at(ask: SlotAsk | None, table: PoolTable | None, turn: Turn) -> float:
    if table is None:  # of a key that this gateway knows the table was lost
        return turn.now if ask is None or ask.held is None else turn.now + LEASE_S
    if turn.now - table.touched_at > LEASE_S / 2 and any(line.held for line in table.lines.values()):
        return turn.now + LEASE_S
    return table.settled_at


def _take_slots(
    limit: int, ask: SlotAsk, lines: Mapping[str, SlotLine], turn: Turn, settled: bool
) -> tuple[int, dict[str, SlotLine]]:
    others = {
        name: line
        for name, line in lines.items()
        if name != turn.gateway_id and (not settled or turn.now - line.written_at <= LEASE_S)
    }
    free = max(limit - sum(line.held for line in others.values()) - ask.running, 0)
    granted = min(ask.need, free)
    granted += min(ask.running + ask.need, (free - granted) // (2 * turn.gateways))
    held = ask.running + granted
    if not settled and ask.held is not None:
        held = min(held, max(ask.held, ask.running))
    return held, {**others, turn.gateway_id: SlotLine(held, turn.now)} if held else others
