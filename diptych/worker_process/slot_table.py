"""Slots of adapters that steps read, their holders, and the line of those who wait for one.

Pure: no I/O, no clock. Attempts that hold the same adapter share its slot. A slot whose last holder left
keeps its adapter until another one needs it; of several the one that was left first is taken. Waiting is
first come, first served: as long as one waits, none that came later takes a slot, even if its own adapter
lies in one. Else an adapter that is always in use would hold its slot for ever.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Taken(NamedTuple):
    """A slot that was taken."""

    slot: int
    fresh: bool
    """True if the adapter has to be put there."""


@dataclass(slots=True)
class _Slot:
    digest: bytes | None = None
    holders: int = 0
    left: int = 0
    """Number of the release by which its last holder left."""


class SlotTable:
    """Slots `0 .. count - 1`."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._line: dict[Hashable, bytes] = {}
        self._releases = 0

    @property
    def first(self) -> Hashable | None:
        """The first in line; None if none waits."""
        return next(iter(self._line), None)

    def may_take(self, holder: Hashable, digest: bytes) -> bool:
        """Return whether `holder` may take a slot now. It stands in line until `take` or `leave`."""
        self._line.setdefault(holder, digest)
        return self.first == holder and self._find(digest) is not None

    def take(self, holder: Hashable) -> Taken:
        """Give the first in line a slot with its adapter. Raises RuntimeError unless `may_take` was true."""
        if self.first != holder or (number := self._find(self._line[holder])) is None:
            raise RuntimeError(f"{holder} cannot take a slot")
        digest, slot = self._line.pop(holder), self._slots[number]
        fresh = slot.digest != digest
        slot.digest = digest
        slot.holders += 1
        return Taken(number, fresh)

    def leave(self, holder: Hashable) -> None:
        """Take `holder` out of the line, if it stands there."""
        self._line.pop(holder, None)

    def release(self, number: int) -> None:
        """End one holding of a slot, of which no step reads any more."""
        slot = self._slots[number]
        if slot.holders < 1:
            raise RuntimeError(f"slot {number} has no holder")
        slot.holders -= 1
        self._releases += 1
        slot.left = self._releases

    def evict(self, digest: bytes) -> int | None:
        """Empty the slot of an adapter without holders, and return its number; None if it has none."""
        for number, slot in enumerate(self._slots):
            if slot.digest == digest:
                if slot.holders:
                    raise RuntimeError(f"slot {number} is held")
                slot.digest = None
                return number
        return None

    def invariants(self) -> None:
        """Raise RuntimeError if an adapter lies in two slots, or a slot without one is held."""
        there = [slot.digest for slot in self._slots if slot.digest is not None]
        if len(set(there)) != len(there):
            raise RuntimeError("an adapter lies in two slots")
        if any(slot.holders and slot.digest is None for slot in self._slots):
            raise RuntimeError("an empty slot is held")

    def _find(self, digest: bytes) -> int | None:
        """Return the slot that an adapter lies in, else one that it can be put into; None without one."""
        free = []
        for number, slot in enumerate(self._slots):
            if slot.digest == digest:
                return number
            if not slot.holders:
                free.append((slot.digest is not None, slot.left, number))
        return min(free)[2] if free else None
