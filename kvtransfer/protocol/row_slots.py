"""Slots of a mapped region, through which parts of rows pass in a ring. Pure: no I/O, no clock.

Part number n lies in slot n modulo their number. The writer may use a slot again once its reader has copied,
or dropped, the part before. Nothing depends on it for correctness: a part that was overwritten too early
differs from its checksum, which binds it to its ask.
"""

from __future__ import annotations


class RowSlots:
    """The writer's count of parts that it wrote, and of those that were read."""

    def __init__(self, slots: int) -> None:
        """Begin with `slots` slots, all free. Raises ValueError for none."""
        if slots < 1:
            raise ValueError("a region needs at least one slot")
        self._slots = slots
        self._written = 0
        self._read = 0

    @property
    def free(self) -> int:
        """Number of slots that may be written."""
        return self._slots - (self._written - self._read)

    def take(self) -> int:
        """Return the slot for the next part. Raises ValueError if none is free."""
        if not self.free:
            raise ValueError("every slot holds a part that is not read")
        slot = self._written % self._slots
        self._written += 1
        return slot

    def read(self, parts: int) -> None:
        """Take the reader's count of all parts so far.

        Raises ValueError for a count of parts that were not written, or one that goes back.
        """
        if not self._read <= parts <= self._written:
            raise ValueError(f"{parts} parts are read, of {self._written} written and {self._read} before")
        self._read = parts
