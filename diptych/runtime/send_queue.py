"""Queue of a stream's outgoing items, which its single writer takes in as few messages as it can."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class SendQueue(Generic[T]):
    """An unbounded queue whose reader takes everything at once, so that a slow stream coalesces.

    Bounded by its users: a worker puts at most one item per running request and step, and drops the
    outbox with the stream. Not thread-safe: one event loop owns it.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, item: T) -> None:
        """Queue `item`; dropped in silence once the outbox is closed (its stream is gone)."""
        if not self._closed:
            self._items.append(item)
            self._ready.set()

    def close(self) -> None:
        """Accept no more items; `take()` hands out what is left, then nothing."""
        self._closed = True
        self._ready.set()

    async def take(self) -> list[T]:
        """Return everything queued since the last call, waiting for at least one item; empty = closed."""
        await self._ready.wait()
        items, self._items = self._items, []
        if not self._closed:
            self._ready.clear()
        return items
