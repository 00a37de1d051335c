"""What a call of several prompts uses of its key's quotas: let in as one, and as one paid or not."""

from __future__ import annotations

from gateway.access.quota import QuotaUsage


class BatchQuota:
    """In the place of the key's meter for each of the prompts, whose tokens are not known before.

    All requests are taken at once, so that no part finds a quota used up by another part or by a request
    that came meanwhile; their tokens may overdraw what is left of the minute.

    Raises:
        QuotaExceeded: there is no room for so many requests, or no token left. Nothing was counted.
    """

    def __init__(self, meter: QuotaUsage, prompts: int, now: float) -> None:
        meter.require(prompts, 0, now)
        self._meter = meter
        self._to_begin = prompts
        self._paid_requests = 0
        self._paid_tokens = 0
        meter.take(prompts, 0)

    def require(self, requests: int, prompt_tokens: int, now: float) -> None:
        """The list was let in."""

    def begin(self, prompt_tokens: int, now: float) -> None:
        self._to_begin -= 1
        self._meter.take(0, prompt_tokens)
        self._paid_tokens += prompt_tokens

    def end(self, output_tokens: int) -> None:
        self._meter.end(output_tokens)
        self._paid_requests += 1
        self._paid_tokens += output_tokens

    def refused(self, prompt_tokens: int) -> None:
        self._meter.refused(prompt_tokens)
        self._paid_tokens -= prompt_tokens

    def close(self, *, served: bool) -> None:
        """After the last of them. Not served: the call was answered with a refusal and nothing else."""
        for _ in range(self._to_begin):
            self._meter.refused(0)
        if not served:
            self._meter.give_back(self._paid_requests, self._paid_tokens)
