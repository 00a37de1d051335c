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

from gateway.limits import INLINE_PARSE_BYTES

T = TypeVar("T")
THREADS = 2


class LongTexts:
    """Where messages are read. To be made where an event loop will run it, and closed at the end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "long-text")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, message: Message, tenant: str, work: Callable[[], T]) -> T:
        """What `work` makes of the message: at once if short, else in a thread, in the tenant's turn."""
        if message.ByteSize() < INLINE_PARSE_BYTES:
            return work()
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Lock()
        await turn.acquire()
        try:
            working = self._threads.submit(work)
        except BaseException:
            turn.release()
            raise
        # Not when the caller leaves: its thread goes on until the text is read.
        working.add_done_callback(_releases(turn, asyncio.get_running_loop()))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """No call is running any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _releases(turn: asyncio.Lock, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
    def release(_: Future[T]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(turn.release)

    return release
