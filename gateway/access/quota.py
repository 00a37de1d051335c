"""Quotas of an API key: requests and tokens per minute, and concurrent requests.

Requests and tokens per minute are token buckets: each holds a minute's worth, refills steadily, and may be
overdrawn by amounts that were not known beforehand. Prompt tokens are charged when a request begins, output
tokens when it ends. Cached prompt tokens count like others. Gateways of one directory share quotas: see
`gateway.access.shared_quota`. Pure, but for what a lease does; times are seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.errors import QuotaExceeded

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0  # the retry hint while too many requests run: when one of them ends is not known
SHORTEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def most_together(self) -> int | None:
        """The number of requests that can ever begin at once."""
        bounds = (self.requests_per_minute, self.concurrent_requests)
        return min((bound for bound in bounds if bound is not None), default=None)


class Bucket(Protocol):
    """A token bucket that may be overdrawn."""

    def wait_s(self, amount: float, now: float) -> float: ...
    def take(self, amount: float) -> None: ...
    def give_back(self, amount: float) -> None: ...


class _Bucket:
    """A token bucket of this gateway alone, full at first."""

    def __init__(self, per_minute: int) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._at: float | None = None

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` is available; above the size, until the bucket is full."""
        if self._at is not None:
            filled = max(now - self._at, 0.0) * self._size / MINUTE_S
            self._level = min(self._level + filled, self._size)
        self._at = now
        short = min(amount, self._size) - self._level
        return max(short, 0.0) * MINUTE_S / self._size

    def take(self, amount: float) -> None:
        self._level -= amount

    def give_back(self, amount: float) -> None:
        self._level = min(self._level + amount, self._size)


class Slots:
    """Places of concurrent requests."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.running = 0

    @property
    def most(self) -> int | None:
        """The most requests that may run now; None: any number."""
        return self._limit


class Lease(Protocol):
    """Part of a key's quota that this gateway holds for its requests; None where nothing is limited."""

    @property
    def requests(self) -> Bucket | None: ...
    @property
    def tokens(self) -> Bucket | None: ...
    @property
    def slots(self) -> Slots | None: ...

    async def prepare(self, requests: int, prompt_tokens: int) -> None: ...
    def used(self) -> None: ...


class Charge(Protocol):
    """The charge of one request to its key's quota; see `QuotaUsage`."""

    async def prepare(self, requests: int, prompt_tokens: int) -> None: ...
    def require(self, requests: int, prompt_tokens: int, now: float) -> None: ...
    def begin(self, prompt_tokens: int, now: float) -> None: ...
    def end(self, output_tokens: int) -> None: ...
    def refused(self, prompt_tokens: int) -> None: ...


class QuotaUsage:
    """Usage of one key's quota.

    Args:
        name: the key's name, which a refusal shows to the client.
        quota: the key's limits; None: none.
        lease: this gateway's part of the quota; None: it is this gateway's alone.
    """

    def __init__(self, name: str, quota: Quota | None = None, lease: Lease | None = None) -> None:
        self.name = name
        self.quota = quota = quota or Quota()
        self._lease = lease
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        slots: Slots | None = None
        if lease is not None:
            self._requests, self._tokens, slots = lease.requests, lease.tokens, lease.slots
        else:
            self._requests = _Bucket(quota.requests_per_minute) if quota.requests_per_minute else None
            self._tokens = _Bucket(quota.tokens_per_minute) if quota.tokens_per_minute else None
        self._slots = slots or Slots(quota.concurrent_requests)

    @property
    def running(self) -> int:
        """The number of requests that run here."""
        return self._slots.running

    async def prepare(self, requests: int, prompt_tokens: int) -> None:
        """Take what is lacking from the quota that gateways share; may wait for it, but never long."""
        if self._lease is not None:
            await self._lease.prepare(requests, prompt_tokens)

    def begin(self, prompt_tokens: int, now: float) -> None:
        """Charge a request that begins; `end` or `refused` must follow.

        Raises `QuotaExceeded`; nothing is charged then.
        """
        self.require(1, prompt_tokens, now)
        self.take(1, prompt_tokens)

    def require(self, requests: int, prompt_tokens: int, now: float) -> None:
        """Check that ``requests`` with ``prompt_tokens`` in total may begin now. Raises `QuotaExceeded`."""
        most = self._slots.most
        if most is not None and self.running + requests > most:
            limit = f"{self.quota.concurrent_requests} requests at the same time"
            raise QuotaExceeded(self.name, limit, BUSY_RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(requests, now)):
            raise self._exceeded(f"{self.quota.requests_per_minute} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(prompt_tokens, now)):
            raise self._exceeded(f"{self.quota.tokens_per_minute} tokens a minute", wait_s)

    def take(self, requests: int, prompt_tokens: int) -> None:
        """Charge requests that begin, whatever is left; `end` or `refused` must follow for each."""
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(prompt_tokens)
        self._slots.running += requests
        self._tell_lease()

    def end(self, output_tokens: int) -> None:
        """Charge the output of a request that ended, for whatever reason."""
        self._slots.running -= 1
        if self._tokens is not None:
            self._tokens.take(output_tokens)
        self._tell_lease()

    def refused(self, prompt_tokens: int) -> None:
        """Refund a request that the server could not serve; called in place of `end`."""
        self._slots.running -= 1
        self.give_back(1, prompt_tokens)

    def give_back(self, requests: int, tokens: int) -> None:
        """Refund requests that have ended."""
        if self._requests is not None:
            self._requests.give_back(requests)
        if self._tokens is not None:
            self._tokens.give_back(tokens)
        self._tell_lease()

    def _tell_lease(self) -> None:
        if self._lease is not None:
            self._lease.used()

    def _exceeded(self, quota: str, wait_s: float) -> QuotaExceeded:
        return QuotaExceeded(self.name, quota, max(wait_s, SHORTEST_RETRY_S))


class BatchQuota:
    """Usage by one call of several prompts, admitted as a whole and paid as a whole or not at all.

    Stands in for the key's `QuotaUsage` for each of the prompts, whose lengths are not known beforehand. All
    requests are charged at once, so that no prompt finds a quota used up by another one or by a request that
    came meanwhile; their tokens may overdraw what is left of the minute. `QuotaUsage.prepare` comes before.

    Raises:
        QuotaExceeded: not so many requests may begin, or no token is left. Nothing was charged.
    """

    def __init__(self, usage: QuotaUsage, prompts: int, now: float) -> None:
        usage.require(prompts, 0, now)
        self._usage = usage
        self._to_begin = prompts
        self._paid_requests = 0
        self._paid_tokens = 0
        usage.take(prompts, 0)

    async def prepare(self, requests: int, prompt_tokens: int) -> None:
        """Return: the whole batch was admitted before."""

    def require(self, requests: int, prompt_tokens: int, now: float) -> None:
        """Accept: the whole batch was admitted before."""

    def begin(self, prompt_tokens: int, now: float) -> None:
        self._to_begin -= 1
        self._usage.take(0, prompt_tokens)
        self._paid_tokens += prompt_tokens

    def end(self, output_tokens: int) -> None:
        self._usage.end(output_tokens)
        self._paid_requests += 1
        self._paid_tokens += output_tokens

    def refused(self, prompt_tokens: int) -> None:
        self._usage.refused(prompt_tokens)
        self._paid_tokens -= prompt_tokens

    def close(self, *, served: bool) -> None:
        """Settle the batch after its last prompt. ``served``: the call got more than a refusal."""
        for _ in range(self._to_begin):
            self._usage.refused(0)
        if not served:
            self._usage.give_back(self._paid_requests, self._paid_tokens)
