"""Slice of a key's quota that this gateway holds: what may begin at once, and what to ask the pool for.

Requests are charged to the slice alone. While the pool is out of reach the slice holds; to it come this
gateway's part of what the pool had left, and its part of what the quota grants from then on. Both are told to
the pool afterwards, so that an outage lends and does not give.

Each class has turns: `ask`, then `granted`, or `refused` where the turn did not happen. After one without an
answer, which may have happened, comes nothing: what was brought to the pool then is gone.

Pure; times are seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.access.quota import MINUTE_S, SHORTEST_RETRY_S, Quota, Slots
from gateway.access.shared_quota.pool import PoolAsk, PoolGrant, SliceAsk, SliceGrant, SlotAsk

SPARE_S: Final = 1.0
"""Time for which a gateway asks in advance, by the quota's rate or by what it used lately."""
ASK_AGAIN_S: Final = 0.25
"""Time for which the pool's answer that nothing is left is believed."""


@dataclass(slots=True)
class PoolView:
    """Knowledge of all pools: whether they answer, and how many gateways share them."""

    answers: bool = True
    gateways: int = 1


class BucketSlice:
    """Slice of a token bucket of ``per_minute``."""

    def __init__(self, per_minute: int, view: PoolView) -> None:
        self._size = float(per_minute)
        self._rate = per_minute / MINUTE_S
        self._view = view
        self._credit = 0.0  # below 0: used, and not taken from the pool yet
        self._used = 0.0  # since the last turn
        self._spare = 0.0  # of the last turn
        self._grown = 0.0  # added while the pool was out of reach, and not told to it
        self._grew_at: float | None = None
        self._asked = SliceAsk()
        self._told = 0.0  # of what was added, in the turn that goes on
        self._known: float | None = None  # level of the pool, and when it was that
        self._known_at = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` may be taken, as far as this gateway can tell; 0: now."""
        if not self._view.answers:
            self._grow(now)
            return max(min(amount, self._part) - self._credit, 0.0) * self._view.gateways / self._rate
        short = min(amount, self._size) - self._credit
        return max((short - self._in_pool(now)) / self._rate, SHORTEST_RETRY_S) if short > 0 else 0.0

    def take(self, amount: float) -> None:
        self._credit -= amount
        self._used += amount

    def give_back(self, amount: float) -> None:
        self._credit += amount

    def lacks(self, amount: float, now: float) -> bool:
        """Return whether the pool should be asked before ``amount`` is taken."""
        short = min(amount, self._size) - self._credit
        return short > 0 and (short <= self._in_pool(now) or now - self._known_at >= ASK_AGAIN_S)

    @property
    def runs_low(self) -> bool:
        """True where half of what was to spare is gone, or more was used than taken."""
        return self._credit < self._spare / 2

    @property
    def idle(self) -> bool:
        """True where nothing of the pool is held, and it is owed nothing."""
        return self._credit == self._grown == self._used == 0.0

    def ask(self, need: float, now: float) -> SliceAsk:
        """Return what to ask for, with ``need`` for waiting requests."""
        held = max(self._credit, 0.0)
        resting = not need and not self._used
        wanted = max(self._rate * SPARE_S, self._used)
        self._asked = SliceAsk(
            need=max(min(need, self._size) - held, 0.0),
            spare=0.0 if resting else max(wanted - max(held - need, 0.0), 0.0),
            back=held if resting else 0.0,
            debt=max(-self._credit, 0.0) + self._grown,
            known=None if self._known is None else self._in_pool(now),
        )
        self._credit -= self._asked.back
        self._used, self._told = 0.0, self._grown
        return self._asked

    def granted(self, grant: SliceGrant, now: float) -> None:
        """Take what the pool gave."""
        self._credit += grant.amount + self._asked.debt - self._told
        self._grown, self._grew_at = self._grown - self._told, None
        self._spare = max(grant.amount - self._asked.need, 0.0)
        self._known, self._known_at = grant.left, now

    def refused(self) -> None:
        """Keep what was brought."""
        self._credit += self._asked.back

    @property
    def _part(self) -> float:
        return max(self._size / self._view.gateways, 1.0)

    def _in_pool(self, now: float) -> float:
        if self._known is None:
            return self._size
        return min(self._known + (now - self._known_at) * self._rate, self._size)

    def _grow(self, now: float) -> None:
        if self._grew_at is None:
            fresh = self._part if self._known is None else max(self._in_pool(now), 0.0) / self._view.gateways
        else:
            fresh = (now - self._grew_at) * self._rate / self._view.gateways
            fresh = max(min(fresh, self._part - self._credit), 0.0)
        self._grew_at = now
        self._credit += fresh
        self._grown += fresh


class SlotSlice(Slots):
    """Places of concurrent requests that this gateway holds, of ``limit``."""

    def __init__(self, limit: int, view: PoolView) -> None:
        super().__init__(limit)
        self._part_of = limit
        self._view = view
        self._held: int | None = None  # None before the pool's first answer
        self._spare = 0  # of the last turn
        self._wanted, self._ran, self._asked_at = 0, 0, 0.0  # at the last turn
        self._full_at: float | None = None

    @property
    def most(self) -> int:
        """The most requests that may run here now."""
        if self._view.answers:
            return self._held or 0
        return self._held or max(self._part_of // self._view.gateways, 1)

    def lacks(self, requests: int, now: float) -> bool:
        """Return whether the pool should be asked before so many more requests begin."""
        self._forget_if_ended()
        believed = self._full_at is not None and now - self._full_at < ASK_AGAIN_S
        return self.running + requests > self.most and not believed

    @property
    def is_full(self) -> bool:
        """True where the pool had too few places at the last turn."""
        return self._full_at is not None

    @property
    def has_unused(self) -> bool:
        """True where more places are unused than were taken in advance: other gateways may miss them."""
        return (self._held or 0) - self.running > 2 * self._spare

    @property
    def idle(self) -> bool:
        """True where no place is held."""
        return not self.running and not self._held

    def ask(self, need: int, now: float) -> SlotAsk:
        """Return what to ask for. Places beyond running and waiting requests are brought back."""
        self._forget_if_ended()
        asked = SlotAsk(self.running, need, self._held)
        if self._held is not None:
            self._held = min(self._held, self.running + need)
        self._wanted, self._ran, self._asked_at = self.running + need, self.running, now
        return asked

    def granted(self, held: int) -> None:
        """Take the places that the pool gave, of those that were held before as well."""
        self._held, self._spare = held, max(held - self._wanted, 0)
        self._full_at = self._asked_at if held < self._wanted else None

    def _forget_if_ended(self) -> None:
        if self.running < self._ran:  # the pool has a place again, or will have it
            self._full_at = None


class QuotaSlice:
    """Slice of all that a quota limits."""

    def __init__(self, quota: Quota, view: PoolView) -> None:
        self._view = view
        self.requests = BucketSlice(quota.requests_per_minute, view) if quota.requests_per_minute else None
        self.tokens = BucketSlice(quota.tokens_per_minute, view) if quota.tokens_per_minute else None
        self.slots = SlotSlice(quota.concurrent_requests, view) if quota.concurrent_requests else None

    def lacks(self, requests: int, tokens: int, now: float) -> bool:
        """Return whether the pool should be asked before so many requests and prompt tokens are charged."""
        if not self._view.answers:
            return False
        return (
            (self.requests is not None and bool(requests) and self.requests.lacks(requests, now))
            or (self.tokens is not None and self.tokens.lacks(tokens, now))
            or (self.slots is not None and bool(requests) and self.slots.lacks(requests, now))
        )

    @property
    def runs_low(self) -> bool:
        """True where the next request may find too little, or the next gateway may miss a place."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return any(bucket.runs_low for bucket in buckets) or (
            self.slots is not None and self.slots.has_unused
        )

    @property
    def idle(self) -> bool:
        """True where the pool need not be asked."""
        parts = (self.requests, self.tokens, self.slots)
        return all(part is None or part.idle for part in parts)

    def ask(self, requests: int, tokens: int, now: float) -> PoolAsk:
        """Return what to ask for, with the needs of requests that wait."""
        return PoolAsk(
            None if self.requests is None else self.requests.ask(requests, now),
            None if self.tokens is None else self.tokens.ask(tokens, now),
            None if self.slots is None else self.slots.ask(requests, now),
        )

    def granted(self, grant: PoolGrant, now: float) -> None:
        """Take what the pool gave."""
        if self.requests is not None and grant.requests is not None:
            self.requests.granted(grant.requests, now)
        if self.tokens is not None and grant.tokens is not None:
            self.tokens.granted(grant.tokens, now)
        if self.slots is not None and grant.slots is not None:
            self.slots.granted(grant.slots)

    def refused(self) -> None:
        """Keep what was brought: the turn did not happen."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refused()
