"""Tier in the memory of this process: the entries used last, up to a number of bytes.

With slots of page-locked memory (pinned.py) entries lie in these. A block that a GPU copied into a slot is
kept where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Lock

from diptych.engine.kv.tiers.pinned import PinnedSlots
from diptych.engine.kv.tiers.tier import Entry, Moved
from diptych.engine.kv.tiers.use_order import UseOrder


class RamTier:
    """Entries in memory; they leave as use_order.py says."""

    name = "ram"
    at_once = 1

    def __init__(
        self, quota: int, clock: Callable[[], float] = time.monotonic, slots: PinnedSlots | None = None
    ) -> None:
        """Hold at most `quota` bytes of entries, in `slots` where some are given."""
        self._quota = quota
        self.slots = slots
        self._entries: dict[bytes, Entry] = {}
        self._order = UseOrder(clock)
        self._used = 0
        self._lock = Lock()

    @property
    def used(self) -> int:
        return self._used

    def parent_of(self, key: bytes) -> bytes | None:
        return self._order.parent_of(key)

    def items(self) -> list[tuple[bytes, bytes]]:
        with self._lock:
            return self._order.items()

    def rescan(self) -> Moved:
        return Moved()

    def get(self, key: bytes) -> Entry | None:
        with self._lock:
            self._order.touch(key)
            return self._entries.get(key)

    def put(self, key: bytes, parent: bytes, entry: Entry) -> list[bytes]:
        gone: list[bytes] = []
        with self._lock:
            if len(entry) > self._quota:
                return gone
            self._drop(key)
            while self._used + len(entry) > self._quota and (oldest := self._order.oldest()) is not None:
                self._drop(oldest)
                gone.append(oldest)
            kept = self._own(entry)
            if kept is not None:
                self._entries[key] = kept
                self._order.add(key, parent)
                self._used += len(entry)
        return gone

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def close(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._drop(key)
        if self.slots is not None:
            self.slots.close()

    def _own(self, entry: Entry) -> Entry | None:
        """Return the entry as it is kept; None if what moves has all slots."""
        if self.slots is None or self.slots.owns(entry):
            return entry
        room = self.slots.take()
        if room is None:
            return None
        room.entry[:] = entry
        return room.entry

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._order.remove(key)
            self._used -= len(entry)
