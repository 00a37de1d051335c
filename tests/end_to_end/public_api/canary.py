"""Streams beside which a test does its worst: what others are doing must not be felt in them."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time

from diptych.client import AsyncClient
from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import MODEL


class Canary:
    """A stream after another in a thread of its own, and the time between their tokens.

    Leaving the block fails if one of them did.
    """

    def __init__(self, stack: Stack) -> None:
        self._address = stack.address
        self._gaps: list[float] = []
        self._failure: BaseException | None = None

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self._gaps, n=100)[98] * 1e3

    @property
    def longest_ms(self) -> float:
        return max(self._gaps) * 1e3

    def __enter__(self) -> Canary:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self._failure is None, self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        except BaseException as failure:
            self._failure = failure

    async def _listen(self) -> None:
        async with AsyncClient(self._address, model=MODEL) as client:
            while not self._stop.is_set() or len(self._gaps) < 100:
                last: float | None = None
                stream = client.stream("canary", max_tokens=200, ignore_eos=True, temperature=0.0)
                async with stream:
                    async for _ in stream:
                        now = time.perf_counter()
                        if last is not None:
                            self._gaps.append(now - last)
                        last = now
