"""The admitted requests without a first token: those that workers have, and those that no worker can take."""

from __future__ import annotations

from gateway.admission.ticket import Ticket


class DispatchedPrompts:
    """Count of the prompts that left the queue.

    Attributes:
        tokens: of prompts that workers have.
        requests: whose prompts these are.
        stalled_tokens: of prompts that no worker can take now.
        stalled: requests whose prompts these are.
        given: of these, without a place meanwhile.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.requests = 0
        self.stalled_tokens = 0
        self.stalled = 0
        self.given = 0

    def add(self, ticket: Ticket) -> None:
        """Count a request that was admitted."""
        self.tokens += ticket.tokens
        self.requests += 1

    def remove(self, ticket: Ticket) -> None:
        """Count a request no more, which has its first token or is over, and does not stall."""
        self.tokens -= ticket.tokens
        self.requests -= 1

    def stall(self, ticket: Ticket) -> None:
        """Count a request as one that no worker can take."""
        self.remove(ticket)
        ticket.stalled = ticket.has_stalled = True
        self.stalled_tokens += ticket.tokens
        self.stalled += 1

    def resume(self, ticket: Ticket) -> None:
        """Count a request that stalled as one that workers have."""
        ticket.stalled = False
        self.given -= ticket.given is not None
        self.stalled_tokens -= ticket.tokens
        self.stalled -= 1
        self.add(ticket)

    @property
    def held_up(self) -> int:
        """Number of requests that stall and keep their places."""
        return self.stalled - self.given

    def invariants(self, waiting_tokens: int, running: int) -> None:
        """Raise AssertionError when the counts do not add up to those of all requests."""
        known = self.tokens + self.stalled_tokens
        assert 0 <= known <= waiting_tokens, "tokens were given back twice"
        assert 0 <= self.given <= self.stalled, "more requests gave their places than stall"
        assert self.held_up <= running, "more requests stall than run"
        assert self.stalled or not self.stalled_tokens, "tokens stall without a request"
