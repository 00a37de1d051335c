"""The gateway's index of cached prefixes: which decode workers hold which chunks, as of a moment ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from diptych.replay.events import Events

DELAY_S = 0.25
"""Seconds until a change is known: workers publish theirs with their heartbeats."""


class ReplayedIndex:
    """Chunks by decode worker; sets of workers are the bits of a number."""

    def __init__(self, events: Events, delay_s: float) -> None:
        self._events, self._delay_s = events, delay_s
        self._holders: dict[int, int] = {}
        self._changes: deque[tuple[float, int, int, bool]] = deque()

    def record(self, worker: int, chunk: int, came: bool) -> None:
        """Note a change at a worker, which lookups see after the delay."""
        self._changes.append((self._events.now + self._delay_s, worker, chunk, came))

    def hits(self, chain: Sequence[int]) -> dict[int, int]:
        """Return the leading chunks of `chain` that each worker holds, without those that hold none."""
        self._catch_up()
        found: dict[int, int] = {}
        holders = -1
        for count, chunk in enumerate(chain):
            still = self._holders.get(chunk, 0) & holders
            if count:
                _note(found, holders & ~still, count)
            holders = still
            if not holders:
                break
        else:
            if chain:
                _note(found, holders, len(chain))
        return found

    def _catch_up(self) -> None:
        while self._changes and self._changes[0][0] <= self._events.now:
            _, worker, chunk, came = self._changes.popleft()
            bits = self._holders.get(chunk, 0)
            bits = bits | 1 << worker if came else bits & ~(1 << worker)
            if bits:
                self._holders[chunk] = bits
            else:
                self._holders.pop(chunk, None)


def _note(found: dict[int, int], workers: int, count: int) -> None:
    while workers:
        lowest = workers & -workers
        found[lowest.bit_length() - 1] = count
        workers ^= lowest
