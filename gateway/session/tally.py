"""What all choices of a request have in common: sizes, limits, and what has happened to it. Pure."""

from __future__ import annotations

from gateway.session.casualties import Casualties
from gateway.session.recovery import WAIT_FOR_WORKER_S
from gateway.session.retry_budget import RetryBudget


class Tally:
    """Of one request.

    Args:
        max_tokens: of one choice.
        budget: of the gateway; what a fault makes us repeat is paid from it. None = no limit.
        wait_s: how long a choice that lost its worker waits for another one to come; 0 = not at all.
    """

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        budget: RetryBudget | None = None,
        wait_s: float = WAIT_FOR_WORKER_S,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.budget = budget
        self.wait_s = wait_s
        self.delivered = 0  # tokens that went to the client, over all choices
        self.casualties = Casualties()
