"""The two groups of blocks of a model with recurrent layers: those of keys and values, and pages of states.

A page (state_layout.py) is to a recurrent layer what windowed blocks are to one with a window of two tokens:
a token at position p reads that of position p - 1 and leaves its own. All that holds, hands off, caches and
counts windowed blocks (window_groups.py) holds pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.window_groups import WindowGroups

WINDOW = 2
"""Tokens that a recurrent layer reads: the present one, and the one whose states are there."""
PARTING_PAGES = 1
"""Pages of a ring beside those of the shortest, for a prompt that shares more than it can use."""
LARGE_PAGE = 8
"""Blocks of a page from which on larger blocks are better."""


@dataclass(frozen=True)
class StateGroups(WindowGroups):
    """Groups of which the second is pages: `tables` blocks each. Layers that attend have their place."""

    def ring_places(self, chunk: int, block_size: int) -> tuple[int, int]:
        """Return the pages of the shortest ring and of the longest.

        Two are enough, however long a chunk is: a step reads one page before it writes any. One more keeps
        the states at which a prompt parts from an earlier one, however far that is from its end.
        """
        shortest = self.kept(block_size)
        return shortest, shortest + PARTING_PAGES

    def ring_blocks(self, places: int, chunk: int, block_size: int, tail: int = 0) -> int:
        """See `WindowGroups.ring_blocks`; of the last `tail` places the first and those behind a prompt are
        there in the end.
        """
        shortest, longest = self.ring_places(chunk, block_size)
        return self.tables * min(places, longest if tail > shortest else shortest)

    def ring_of(self, blocks: Sequence[int], places: int, tail: int = 0) -> Sequence[int]:
        """See `WindowGroups.ring_of`: with more places to reach back than pages, entries name pages again.

        The first of the last `tail` places has a page that no later one takes. All others take turns with
        two, so that no place has that of the one before it.
        """
        pages = [blocks[at : at + self.tables] for at in range(0, len(blocks), self.tables)]
        if not tail > len(pages) > WINDOW:
            return blocks
        *turns, parting = pages
        # A multiple of the turns, so that they go on where entries begin again.
        entries = -(-tail // len(turns)) * len(turns)
        ring = [turns[entry % len(turns)] for entry in range(entries)]
        ring[(places - tail) % entries] = parting
        return [block for page in ring for block in page]


def state_groups(attends: Sequence[bool], page_blocks: int) -> StateGroups:
    """Return the groups of a model of whose layers these attend, whose pages take `page_blocks` blocks."""
    slots = [sum(attends[:layer]) for layer in range(len(attends))]
    places = tuple((0, slot) if one else (1, 0) for slot, one in zip(slots, attends, strict=True))
    return StateGroups(WINDOW, sum(attends), page_blocks, places)
