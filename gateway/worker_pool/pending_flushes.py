"""Flushes of prefix caches that workers were asked for and have not answered yet."""

from __future__ import annotations

import asyncio
import itertools

from gateway.worker_pool.codec import Flushed


class PendingFlushes:
    """Matches answers to questions. A worker that is lost meanwhile has no cache any more: it answers 0."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[int]] = {}

    def ask(self, worker_id: str) -> tuple[int, asyncio.Future[int]]:
        """A number for the question, and where the number of forgotten blocks will be."""
        number = next(self._numbers)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[worker_id, number] = future
        future.add_done_callback(lambda _: self._waiting.pop((worker_id, number), None))
        return number, future

    def answered(self, worker_id: str, flushed: Flushed) -> None:
        future = self._waiting.get((worker_id, flushed.request))
        if future is not None and not future.done():
            future.set_result(flushed.blocks)

    def lost(self, worker_id: str) -> None:
        for (asked, _), future in list(self._waiting.items()):
            if asked == worker_id and not future.done():
                future.set_result(0)
