"""Threads for texts that would keep the event loop from everybody's tokens.

Tokenising costs 0.3 µs a byte, a hostile text three times as much, without Python's lock. Each tenant has one
text at a time in work: who sends many long ones waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from google.protobuf.message import Message

from diptych.runtime.errors import Draining, QueueFull
from gateway.limits import INLINE_PARSE_BYTES

T = TypeVar("T")
THREADS = 2
MAX_WAITING = 256
"""Texts of one tenant that wait for its turn."""


class TokenizerPool:
    """Where messages are read. To be made where an event loop will run it, and closed at the end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "long-text")
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
        self._closed = False

    async def read(self, message: Message, tenant: str, work: Callable[[], T]) -> T:
        """What `work` makes of the message: at once if short, else in a thread, in the tenant's turn.

        Raises:
            QueueFull: too many of this tenant wait.
            Draining: this is the end.
        """
        if message.ByteSize() < INLINE_PARSE_BYTES:
            return work()
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = _Turn()
        await turn.wait()
        if self._closed:
            turn.lock.release()
            raise Draining()
        working = self._threads.submit(work)
        # Not when the caller leaves: its thread goes on until the text is read.
        working.add_done_callback(_releases(turn.lock, asyncio.get_running_loop()))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """No call is running any more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Turn:
    """One tenant's, held by each that waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._waiting = 0

    async def wait(self) -> None:
        if self._waiting >= MAX_WAITING:
            raise QueueFull()
        self._waiting += 1
        try:
            await self.lock.acquire()
        finally:
            self._waiting -= 1


def _releases(lock: asyncio.Lock, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
    def release(_: Future[T]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lock.release)

    return release
