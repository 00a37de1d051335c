"""Windowed blocks by place: those of a prompt that is being computed, and those of a sequence that goes on.

A prompt's are its *ring*: a place takes the blocks of the one so many places before it, which no token reads
any more. In front of them lie blocks of a cached prefix, which are read and never written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """Windowed blocks of one prompt. Both lists go place by place, `tables` blocks each."""

    tables: int
    pinned: Sequence[int]
    """Blocks of the cached prefix, up to its end."""
    ring: Sequence[int]
    """Blocks of the places behind the cached prefix: place p has entry p modulo their number. Entries may
    name the same blocks (`WindowGroups.ring_of`).
    """
    cached_places: int
    """Places of the cached prefix."""

    @property
    def first_pinned(self) -> int:
        """First place that `pinned` has blocks of."""
        return self.cached_places - len(self.pinned) // self.tables

    def lasting(self, first: int, places: int) -> Collection[int]:
        """Return the places from `first` on whose content is there once a prompt of so many places is
        computed: of those with the same blocks the last one.
        """
        return {self.blocks(place)[0]: place for place in range(first, places)}.values()

    @property
    def held(self) -> list[int]:
        """Return all blocks, each once."""
        return [*self.pinned, *dict.fromkeys(self.ring)]

    def ring_index(self, place: int) -> int:
        """Return the index in `ring` of the first block of a place behind the cached prefix."""
        return place % (len(self.ring) // self.tables) * self.tables

    def blocks(self, place: int) -> Sequence[int]:
        """Return the `tables` blocks of a place, whose content is there while the ring is at it."""
        if place >= self.cached_places:
            at = self.ring_index(place)
            return self.ring[at : at + self.tables]
        at = (place - self.first_pinned) * self.tables
        if at < 0:
            raise IndexError(
                f"place {place} lies before the blocks of the window, from {self.first_pinned} on"
            )
        return self.pinned[at : at + self.tables]

    def tables_of(self, first: int, end: int, *, wraps: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return the tables of places `first .. end - 1`, as `SequenceStep.window_tables` has them.

        Raises IndexError for more places behind the cached prefix than the ring has, unless it `wraps`: two
        places have the same blocks then, and what is left in them is the later one's.
        """
        if not wraps and (end - max(first, self.cached_places)) * self.tables > len(self.ring):
            raise IndexError(f"places {first} to {end} do not fit into a ring of {len(self.ring)} blocks")
        places = [self.blocks(place) for place in range(first, end)]
        return tuple(tuple(blocks[table] for blocks in places) for table in range(self.tables))


@dataclass(slots=True)
class WindowTable:
    """Windowed blocks of a sequence: of places from `first` on, `tables` lists with one entry a place."""

    first: int
    tables: list[list[int]] = field(default_factory=list)
    published: int = 0
    """Places that were entered into the prefix cache, counted from 0."""

    @property
    def end(self) -> int:
        """The place behind the last one."""
        return self.first + len(self.tables[0])

    def blocks(self) -> list[int]:
        """Return all blocks."""
        return [block for table in self.tables for block in table]

    def at(self, place: int) -> list[int]:
        """Return the blocks of a place."""
        return [table[place - self.first] for table in self.tables]

    def put(self, place: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a place, which may be the one behind the last."""
        for table, block in zip(self.tables, blocks, strict=True):
            table[place - self.first : place - self.first + 1] = [block]

    def take_before(self, place: int) -> list[int]:
        """Remove the places before `place`; return their blocks."""
        count = max(0, min(place, self.end) - self.first)
        taken = [block for table in self.tables for block in table[:count]]
        for table in self.tables:
            del table[:count]
        self.first += count
        return taken

    def take_from(self, place: int) -> list[int]:
        """Remove the places from `place` on; return their blocks."""
        keep = max(0, place - self.first)
        taken = [block for table in self.tables for block in table[keep:]]
        for table in self.tables:
            del table[keep:]
        return taken

    def cut(self, first: int) -> tuple[tuple[int, ...], ...]:
        """Return the tables from place `first` on, as `SequenceStep.window_tables` has them."""
        return tuple(tuple(table[first - self.first :]) for table in self.tables)

    def copy(self) -> WindowTable:
        """Return a table with the same blocks."""
        return WindowTable(self.first, [list(table) for table in self.tables], self.published)
