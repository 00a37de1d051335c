"""Threads that tokenise long texts, so that the event loop keeps serving other requests' tokens.

Tokenising takes 0.3 µs per byte, three times as long for a hostile text, without Python's lock. One text per
tenant is processed at a time: a tenant that sends many long ones delays itself only.
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
"""Waiting texts per tenant."""


class TokenizerPool:
    """Thread pool for work on long messages; its calls run in one event loop. To be closed at the end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "long-text")
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
        self._closed = False

    async def run(self, message: Message, tenant: str, work: Callable[[], T]) -> T:
        """Call ``work``, for a long message in a thread in the tenant's turn; return its result.

        Raises:
            QueueFull: too many messages of this tenant wait.
            Draining: the pool was closed.
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
        # A cancelled caller keeps the turn: its thread runs until the work is done.
        working.add_done_callback(_releaser(turn.lock, asyncio.get_running_loop()))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """Stop the threads; no call may be running."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Turn:
    """Turn of one tenant, kept alive by the calls that wait for it."""

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


def _releaser(lock: asyncio.Lock, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
    def release(_: Future[T]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lock.release)

    return release
