"""What all choices of a request have in common: sizes, limits, and what has happened to it. Pure."""

from __future__ import annotations

from gateway.session.failed_workers import FailedWorkers
from gateway.session.retry_budget import RetryBudget
from gateway.session.retry_policy import WAIT_FOR_WORKER_S


class RequestLimits:
    """Of one request.

    Args:
        max_tokens: of one choice.
        budget: of the gateway; what a fault makes us repeat is paid from it. None = no limit.
        wait_s: how long a choice that lost its worker waits for another one to come; 0 = not at all.
        constrained: outputs follow a grammar.
    """

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        budget: RetryBudget | None = None,
        wait_s: float = WAIT_FOR_WORKER_S,
        constrained: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.budget = budget
        self.wait_s = wait_s
        self._constrained = constrained
        self.delivered = 0  # tokens that went to the client, over all choices
        self.casualties = FailedWorkers()

    def cut_off(self, tokens: int) -> bool:
        """Whether an output of so many tokens has ended by its length, and by nothing else.

        One that follows a grammar may be complete at its last token: only a worker knows.
        """
        return tokens >= self.max_tokens and not self._constrained
