"""What one key has used of its quotas: requests and tokens a minute, and requests at the same time.

Requests and tokens are token buckets: each holds a minute's worth, fills steadily, may be overdrawn by what
was not known before. Prompt tokens are taken when a request begins, output tokens when it ends. Cached prompt
tokens count as others do. Pure; times are seconds of a monotonic clock. Each gateway counts by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.errors import QuotaExceeded

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0  # the hint while too many requests run: when one of them ends is not known
SHORTEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Quota:
    """None: without a bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def most_together(self) -> int | None:
        """Requests that can ever begin at once."""
        bounds = (self.requests_per_minute, self.concurrent_requests)
        return min((bound for bound in bounds if bound is not None), default=None)


class _Bucket:
    """Starts full."""

    def __init__(self, per_minute: int) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._at: float | None = None

    def wait_s(self, amount: float, now: float) -> float:
        """Until ``amount`` may be taken; of more than there ever is, until the bucket is full."""
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


class Charge(Protocol):
    """What one request does to its key's quotas: see `QuotaUsage`."""

    def require(self, requests: int, prompt_tokens: int, now: float) -> None: ...
    def begin(self, prompt_tokens: int, now: float) -> None: ...
    def end(self, output_tokens: int) -> None: ...
    def refused(self, prompt_tokens: int) -> None: ...


class QuotaUsage:
    """Of one key.

    Args:
        name: of the key, which clients are told with a refusal.
    """

    def __init__(self, name: str, quota: Quota | None = None) -> None:
        self.name = name
        self.quota = quota = quota or Quota()
        self._requests = _Bucket(quota.requests_per_minute) if quota.requests_per_minute else None
        self._tokens = _Bucket(quota.tokens_per_minute) if quota.tokens_per_minute else None
        self.running = 0

    def begin(self, prompt_tokens: int, now: float) -> None:
        """A request begins; `end` is owed. Raises `QuotaExceeded`, and then nothing was counted."""
        self.require(1, prompt_tokens, now)
        self.take(1, prompt_tokens)

    def require(self, requests: int, prompt_tokens: int, now: float) -> None:
        """So many requests, of so many prompt tokens together, may begin now. Raises `QuotaExceeded`."""
        most = self.quota.concurrent_requests
        if most is not None and self.running + requests > most:
            raise QuotaExceeded(self.name, f"{most} requests at the same time", BUSY_RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(requests, now)):
            raise self._exceeded(f"{self.quota.requests_per_minute} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(prompt_tokens, now)):
            raise self._exceeded(f"{self.quota.tokens_per_minute} tokens a minute", wait_s)

    def take(self, requests: int, prompt_tokens: int) -> None:
        """So many begin, whatever there is left; `end` is owed for each."""
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(prompt_tokens)
        self.running += requests

    def end(self, output_tokens: int) -> None:
        """It is over, however."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(output_tokens)

    def refused(self, prompt_tokens: int) -> None:
        """Instead of `end`: the server could not serve it, which the key does not pay for."""
        self.running -= 1
        self.give_back(1, prompt_tokens)

    def give_back(self, requests: int, tokens: int) -> None:
        """Of requests that have ended."""
        if self._requests is not None:
            self._requests.give_back(requests)
        if self._tokens is not None:
            self._tokens.give_back(tokens)

    def _exceeded(self, quota: str, wait_s: float) -> QuotaExceeded:
        return QuotaExceeded(self.name, quota, max(wait_s, SHORTEST_RETRY_S))
