"""What lies ready for a client, between the conversation that puts it there and the handler that sends it.

Output itself stays in each choice's `OutputStream` until it is taken, so whatever comes while the handler
waits for a slow client goes into one message. Bounded by the request's own max_tokens.
"""

from __future__ import annotations

import asyncio

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import FinishReason


class OutputBuffer:
    """One request's. ``held``: nothing is ready before the end."""

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self.due: set[int] = set()  # choices with a piece to send
        self.finished: dict[int, FinishReason] = {}  # all that are complete, told or not
        self.complete = False  # nothing more comes
        self.error: DiptychError | None = None  # likewise
        self._waiter: asyncio.Future[None] | None = None

    def put(self, choice: int) -> None:
        """A choice has something that should go out now."""
        self.due.add(choice)
        if not self.held:
            self._wake()

    def end(self, error: DiptychError | None = None) -> None:
        """Nothing more comes: all choices are complete, or the request failed."""
        self.complete, self.error = error is None, error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def ready(self) -> None:
        """Returns when there is something to send, or the end."""
        while not (self.complete or self.error is not None or (self.due and not self.held)):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> list[int]:
        """The choices that have something to send, in order; they are due no more."""
        due, self.due = self.due, set()
        return sorted(due)
