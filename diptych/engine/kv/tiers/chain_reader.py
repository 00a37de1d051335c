"""Reader of a prefix's blocks: one after the other from memory and disks, several at a time from a server.

A server may answer after tens of milliseconds. What it holds of a run of blocks is asked for at once, by as
many threads as its tier allows (`Tier.at_once`); entries are checked there, and taken in the prefix's order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from diptych.engine.kv.tiers.stack import StoredBlock, TierStack


class ChainReader:
    """Reader of one worker's tiers. `read` is called by one thread at a time."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        most = max((tier.at_once for tier in stack.tiers), default=1)
        self._threads = ThreadPoolExecutor(most, "kv-tiers-fetch") if most > 1 else None
        self._late: Sequence[Future[StoredBlock | None]] = ()

    @property
    def late(self) -> bool:
        """True while a read runs that was given up when its time had passed."""
        return any(not one.done() for one in self._late)

    def at_once(self, key: bytes) -> int:
        """Return how many blocks from `key` on are worth reading at a time."""
        return self._stack.at_once(key) if self._threads is not None else 1

    def read(self, keys: Sequence[bytes], parents: Sequence[bytes], until: float) -> list[StoredBlock]:
        """Return leading blocks, checked, until a miss or the time `until` (monotonic). May block."""
        fetches = self._begin(keys, parents)
        found: list[StoredBlock] = []
        for key, parent in zip(keys, parents, strict=True):
            one = self._next(key, parent, fetches.get(key), until)
            if one is None:
                break
            found.append(one)
        unwanted = [fetch for fetch in fetches.values() if not fetch.done() and not fetch.cancel()]
        self._late = unwanted if time.monotonic() >= until else ()
        return found

    def close(self) -> None:
        """Begin no read any more, and wait for none."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, keys: Sequence[bytes], parents: Sequence[bytes]
    ) -> dict[bytes, Future[StoredBlock | None]]:
        """Ask for what lies in tiers that answer several at a time."""
        if self._threads is None:
            return {}
        try:
            return {
                key: self._threads.submit(self._stack.fetch, key, parent)
                for key, parent in zip(keys, parents, strict=True)
                if self._stack.at_once(key) > 1
            }
        except RuntimeError:
            return {}  # closed a moment ago

    def _next(
        self, key: bytes, parent: bytes, fetch: Future[StoredBlock | None] | None, until: float
    ) -> StoredBlock | None:
        left_s = until - time.monotonic()
        if fetch is None:
            return self._stack.get(key, parent) if left_s > 0 else None
        try:
            one = fetch.result(max(left_s, 0.0))
        except (TimeoutError, CancelledError):
            return None
        if one is not None:
            self._stack.move_up(one)
        return one
