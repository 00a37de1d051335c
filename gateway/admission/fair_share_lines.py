"""Lines in which gateways tell each other what each tenant got: counting one's own, and reading the others'.

Each gateway writes one line, with the tokens that it has served to each tenant so far and the sequences that
run now. Counters, not amounts: a line that is read late, or twice, charges nothing twice. No clock is
compared: a line lives while it changes. Pure; times are seconds of this gateway's monotonic clock.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LEASE_S: Final = 3.0
"""A line that has not changed for so long belongs to a gateway that is gone, or cut off."""
GONE_S: Final = 60.0
"""A line that has not changed for so long is taken out of the table."""
IDLE_S: Final = 10.0
"""A tenant that got nothing for so long is not in the line any more."""
MOST_TENANTS: Final = 1000
"""Tenants in a line: those that were served most."""


class TenantUse(NamedTuple):
    """Tokens that a gateway has served to a tenant so far, and the tenant's sequences that run there."""

    served: int
    running: int


@dataclass(frozen=True, slots=True)
class GatewayLine:
    """Line of one gateway. ``turn`` differs from that of its line before."""

    turn: int
    tenants: Mapping[str, TenantUse]


@dataclass(slots=True)
class _Count:
    served: int
    changed_at: float


class ServedHere:
    """Tokens that this gateway has served to each tenant, and its line."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._new: dict[str, int] = {}
        self._turn = 0

    def add(self, tenant: str, tokens: int) -> None:
        """Count tokens of a request that was admitted."""
        self._new[tenant] = self._new.get(tenant, 0) + tokens

    def next_line(self, running: Mapping[str, int], now: float) -> GatewayLine:
        """Return the line with all that was counted so far, and forget tenants that have become idle."""
        for name, tokens in self._new.items():
            count = self._counts.setdefault(name, _Count(0, now))
            count.served, count.changed_at = count.served + tokens, now
        self._new = {}
        for name in running:
            self._counts.setdefault(name, _Count(0, now)).changed_at = now
        self._counts = {name: one for name, one in self._counts.items() if now - one.changed_at < IDLE_S}
        self._turn += 1
        uses = {name: TenantUse(one.served, running.get(name, 0)) for name, one in self._counts.items()}
        if len(uses) > MOST_TENANTS:
            uses = dict(heapq.nlargest(MOST_TENANTS, uses.items(), key=lambda one: one[1]))
        return GatewayLine(self._turn, uses)


class ElsewhereReading(NamedTuple):
    """Tokens of other gateways since the last reading, and sequences, by tenant; ids of lines long dead."""

    served: Mapping[str, int]
    running: Mapping[str, int]
    dead: tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    line: GatewayLine
    changed_at: float


@dataclass(slots=True)
class OtherLines:
    """Reader of the other gateways' lines."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def read(self, lines: Mapping[str, GatewayLine], now: float) -> ElsewhereReading:
        """Return what was served since the last reading; of a line that is new, nothing yet."""
        served: dict[str, int] = {}
        running: dict[str, int] = {}
        for gateway, line in lines.items():
            seen = self._seen.get(gateway)
            if seen is None:
                self._seen[gateway] = _Seen(line, now)
            elif seen.line.turn != line.turn:
                _add_difference(served, seen.line, line)
                seen.line, seen.changed_at = line, now
            if now - self._seen[gateway].changed_at < LEASE_S:
                for name, use in line.tenants.items():
                    running[name] = running.get(name, 0) + use.running
        self._seen = {gateway: seen for gateway, seen in self._seen.items() if gateway in lines}
        dead = [gateway for gateway, seen in self._seen.items() if now - seen.changed_at >= GONE_S]
        return ElsewhereReading(served, running, tuple(dead))

    def forget(self) -> None:
        """Take the next lines as the first ones: what was served meanwhile is charged to no tenant."""
        self._seen.clear()


def _add_difference(served: dict[str, int], before: GatewayLine, after: GatewayLine) -> None:
    for name, use in after.tenants.items():
        earlier = before.tenants.get(name)
        # A smaller count is a new one: the tenant was idle, or the gateway has started again.
        base = earlier.served if earlier is not None and earlier.served <= use.served else 0
        if use.served > base:
            served[name] = served.get(name, 0) + use.served - base


def encode_line(line: GatewayLine) -> bytes:
    """Return a line as JSON."""
    return json.dumps({"turn": line.turn, "tenants": line.tenants}, separators=(",", ":")).encode()


def decode_line(data: bytes) -> GatewayLine | None:
    """Parse a line; None for what no gateway of this version wrote."""
    try:
        fields = json.loads(data)
        uses = {
            str(name): TenantUse(max(int(served), 0), max(int(running), 0))
            for name, (served, running) in fields["tenants"].items()
        }
        return GatewayLine(int(fields["turn"]), uses)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
