"""Asks for the rows of images, and the parts in which they come. Pure: no I/O, no clock.

The encode worker only copies, so that nothing of the receiver is ever its to write. The fence is the
generation: it grows with every ask, and a part that names one which is not open is stale and never read.
That is so of everything that comes late: after a cancel, after a damaged part, from an attempt before.

An ask is open from `ask` until its last part, a damaged one, or `drop`.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from kvtransfer.protocol.messages import Key

MOST_BYTES = 1 << 32
"""Most bytes of one image's rows: more is a fault."""
_PLACE = struct.Struct("<QIIII")


class RowsPart(NamedTuple):
    """Rows `first_row` to `first_row + rows` of an image that has `total_rows` of `width` numbers each."""

    generation: int
    first_row: int
    rows: int
    total_rows: int
    width: int
    data: bytes | memoryview
    """Row by row; empty of a part whose bytes lie elsewhere."""
    checksum: bytes
    slot: int | None = None
    """Slot of the mapped region where the bytes lie."""


class Arrival(enum.Enum):
    """Verdict on a part."""

    STALE = "stale"
    """Part of no open ask: it is not read."""
    DAMAGED = "damaged"
    """Part that is not what was sent, or not the next one: its ask is closed."""
    MORE = "more"
    COMPLETE = "complete"


class Rows(NamedTuple):
    """The rows of an image, whole."""

    key: Key
    digest: bytes
    total_rows: int
    width: int
    data: bytearray


@dataclass(slots=True)
class _Open:
    key: Key
    digest: bytes
    total_rows: int = 0
    width: int = 0
    rows: int = 0
    data: bytearray = field(default_factory=bytearray)


class RowAsks:
    """The open asks of a prefill worker at one encode worker."""

    def __init__(self, item_bytes: int, generations: itertools.count[int] | None = None) -> None:
        """Expect numbers of `item_bytes` bytes. `generations`: those of all its encode workers together."""
        self._item_bytes = item_bytes
        self._generations = itertools.count(1) if generations is None else generations
        self._open: dict[int, _Open] = {}

    @property
    def keys(self) -> set[Key]:
        """The attempts with an open ask."""
        return {one.key for one in self._open.values()}

    def ask(self, key: Key, digest: bytes) -> int:
        """Open an ask for an image of an attempt; return its generation."""
        generation = next(self._generations)
        self._open[generation] = _Open(key, digest)
        return generation

    def arrive(self, part: RowsPart) -> tuple[Arrival, Rows | None]:
        """Take a part; return what it was, with the rows when they are complete.

        Of a damaged one the rows are those of its ask, without any data, for another ask.
        """
        one = self._open.get(part.generation)
        if one is None:
            return Arrival.STALE, None
        if not self._copy(one, part):
            del self._open[part.generation]
            return Arrival.DAMAGED, Rows(one.key, one.digest, 0, 0, bytearray())
        one.total_rows, one.width = part.total_rows, part.width
        one.rows += part.rows
        if one.rows < one.total_rows:
            return Arrival.MORE, None
        del self._open[part.generation]
        return Arrival.COMPLETE, Rows(one.key, one.digest, one.total_rows, one.width, one.data)

    def deny(self, generation: int) -> Key | None:
        """Close an ask that is denied; return its attempt, None if it is not open."""
        one = self._open.pop(generation, None)
        return None if one is None else one.key

    def drop(self, keys: Collection[Key]) -> None:
        """Close the asks of attempts that need nothing more."""
        self._open = {number: one for number, one in self._open.items() if one.key not in keys}

    def _copy(self, one: _Open, part: RowsPart) -> bool:
        """Take the bytes of a part if they are those that were sent; return whether they are.

        The copy is what is checked: bytes in a mapped region may change while they are read.
        """
        if not self._fits(one, part):
            return False
        at = len(one.data)
        one.data += part.data
        with memoryview(one.data) as view, view[at:] as copy:
            return part.checksum == part_checksum(one.digest, part._replace(data=copy))

    def _fits(self, one: _Open, part: RowsPart) -> bool:
        size = part.width * self._item_bytes
        if part.rows < 1 or part.width < 1 or len(part.data) != part.rows * size:
            return False
        if part.first_row != one.rows or one.rows + part.rows > part.total_rows:
            return False
        if part.total_rows * size > MOST_BYTES:
            return False
        return not one.rows or (one.total_rows, one.width) == (part.total_rows, part.width)


def part_checksum(digest: bytes, part: RowsPart) -> bytes:
    """Return 16 bytes that bind a part's data to its image, its ask and its place; of faults, not forgers."""
    place = _PLACE.pack(part.generation, part.first_row, part.rows, part.total_rows, part.width)
    hasher = xxhash.xxh3_128(place)
    hasher.update(digest)
    hasher.update(part.data)
    return hasher.digest()
