"""Loads of blocks from tiers: read and checked by a thread, within a time, and measured.

What has not come within `LOAD_S` is a miss. A read that hangs is left alone: until it returns no other
begins, so that a tier that does not answer costs one load its time and no other. Blocks of a server are read
several at a time (`ChainReader`): a bucket that is 40 ms away still brings thousands of tokens in this time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from diptych.engine.kv.tiers.chain_reader import ChainReader
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.tiers.stack import StoredBlock, TierStack

LOAD_S = 0.5
"""Most seconds that an attempt waits for blocks from tiers. A prefill worker's ask waits a second for it
(`EscalationTimeouts.attach_s`).
"""
BATCH = 8
"""Blocks that are read and checked at a time; more where a tier answers more at once."""
MARGIN_S = 0.02
"""Time before its end at which a reading thread stops, so that what it has is taken."""
MOST_LOADS = 8
"""Loads at a time; further attempts do without."""
Take = Callable[[int, Sequence[StoredBlock], Callable[[], bool]], Awaitable[int]]
"""Called with the place of a verified block in its prefix, this block and some that follow, and a function
that says whether they may still be used. Returns how many of them were taken.
"""
_KEEP = 0.8
"""Weight of earlier loads in the time a token."""
_log = logging.getLogger(__name__)


class TierLoads:
    """Reader of one worker's tiers. All calls are made on the event loop."""

    def __init__(
        self, block_size: int, stack: TierStack, stage: Callable[[memoryview], memoryview] | None = None
    ) -> None:
        """Take the tokens of a block, the tiers, and what brings a block to where it is copied from."""
        self._block_size = block_size
        self._stack = stack
        self._stage = stage
        self._reader = ChainReader(stack)
        self._running = 0
        self.held_up = 0
        """Reasons for which no load may begin now."""
        self.late: Future[list[StoredBlock]] | None = None
        """Read that was given up while it ran."""
        self.token_s: float | None = None
        """Seconds a token of what was loaded lately; None before."""
        self._thread = ThreadPoolExecutor(1, "kv-tiers-in")

    def close(self) -> None:
        """Begin no read any more, and wait for none."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys a tier holds, 0 while no load can begin."""
        late = self._reader.late or (self.late is not None and not self.late.done())
        return 0 if self.held_up or late or self._running >= MOST_LOADS else self._stack.leading(keys)

    async def load(self, keys: Sequence[bytes], first: int, take: Take) -> Loaded:
        """Load the blocks of `keys[first:]`, one after the other, until one is missing or not wanted.

        `keys` are those of a prefix from its beginning. Never fails: what does not come is a miss.
        """
        loaded, started = Loaded(), time.monotonic()
        self._running += 1
        try:
            await self._load(keys, first, loaded, started + LOAD_S, take)
        except Exception:
            _log.exception("blocks could not be loaded from the tiers")
        finally:
            self._running -= 1
        loaded.seconds = time.monotonic() - started
        if loaded.blocks:
            now = loaded.seconds / (loaded.blocks.total() * self._block_size)
            self.token_s = now if self.token_s is None else _KEEP * self.token_s + (1 - _KEEP) * now
        return loaded

    async def _load(
        self, keys: Sequence[bytes], first: int, loaded: Loaded, until: float, take: Take
    ) -> None:
        epoch = self._stack.epoch
        start = first
        while start < len(keys):
            batch = keys[start : start + max(BATCH, self._reader.at_once(keys[start]))]
            parents = [keys[place - 1] if place else b"" for place in range(start, start + len(batch))]
            found = await self._in_time(until, batch, parents)
            taken = await take(start, found, lambda: self._stack.epoch == epoch) if found else 0
            loaded.blocks.update(one.tier for one in found[:taken])
            if taken < len(batch):
                return
            start += len(batch)

    async def _in_time(
        self, until: float, keys: Sequence[bytes], parents: Sequence[bytes]
    ) -> list[StoredBlock]:
        """Return what the thread reads; nothing if that takes too long."""
        reading = self._thread.submit(self._read, keys, parents, until)
        future = asyncio.wrap_future(reading)
        try:
            done, _ = await asyncio.wait([future], timeout=max(until - time.monotonic(), 0.0))
        finally:
            if not future.done() and not reading.cancel():  # it has begun: what it reads is dropped
                self.late = reading
        return future.result() if done else []

    def _read(self, keys: Sequence[bytes], parents: Sequence[bytes], until: float) -> list[StoredBlock]:
        """Read leading blocks into memory of their own, checked, until a miss or the time. On a thread."""
        found = self._reader.read(keys, parents, until - MARGIN_S)
        if self._stage is None:
            return found
        return [replace(one, payload=self._stage(one.payload)) for one in found]
