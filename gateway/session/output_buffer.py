"""The output that is ready for a client, between the request's driver and the handler that sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import DecodeFinished, FinishReason, TokensArrived
from gateway.worker_pool.codec import WorkerEvent


class OutputBuffer:
    """The choices of one request that have output to send, and the request's end.

    Output itself stays in each choice's `OutputStream` until it is taken, so all that arrives while the
    handler waits for a slow client goes into one message, or a few. Bounded by the request's own max_tokens
    and by `gateway.slow_readers`.

    Args:
        held: nothing is ready before the end.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self.due: dict[int, None] = {}  # choices with a piece to send, those that wait longest first
        self.finished: dict[int, FinishReason] = {}  # all choices that are complete, sent or not
        self.complete = False  # no output follows
        self.error: DiptychError | None = None  # likewise
        self.on_error: Callable[[DiptychError], None] | None = None  # called at once; `ready` returns later
        self._waiter: asyncio.Future[None] | None = None

    def put(self, choice: int) -> None:
        """Mark a choice as one with output to send now."""
        self.due[choice] = None
        if not self.held:
            self._wake()

    def end(self, error: DiptychError | None = None) -> None:
        """Mark the end of the output: all choices are complete, or the request failed."""
        self.complete, self.error = error is None, error
        if error is not None and self.on_error is not None:
            self.on_error(error)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def ready(self) -> None:
        """Return when there is output to send, or the end is reached."""
        while not (self.complete or self.error is not None or (self.due and not self.held)):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, sizes: Sequence[int] = (), most: int = 0) -> list[int]:
        """Return the choices with output to send, in order, and unmark them.

        Given the ``sizes`` of all choices' output, only as many as ``most`` has room for, and at least one.
        """
        if not sizes:
            due, self.due = self.due, {}
            return sorted(due)
        taken: list[int] = []
        total = 0
        for choice in self.due:
            total += sizes[choice]
            if taken and total > most:
                break
            taken.append(choice)
        for choice in taken:
            del self.due[choice]
        return sorted(taken)


class BeamOutput:
    """Pieces of beam search outputs that are not complete; only a whole output is of use.

    A worker sends the outputs once the search is over, in pieces. When it dies between two pieces, another
    search begins at the prompt: it cannot continue at a token, and half an output must not have been
    delivered.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], list[WorkerEvent]] = {}  # by attempt and choice

    def complete(self, events: Sequence[WorkerEvent]) -> list[WorkerEvent]:
        """Return the events to act on now: pieces come with the end of their output."""
        ready: list[WorkerEvent] = []
        for item in events:
            key = item.attempt, item.choice
            if isinstance(item.event, TokensArrived):
                self._pieces.setdefault(key, []).append(item)
                continue
            if isinstance(item.event, DecodeFinished):
                ready += self._pieces.pop(key, ())
            ready.append(item)
        return ready
