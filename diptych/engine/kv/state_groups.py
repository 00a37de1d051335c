"""The two groups of blocks of a model with recurrent layers: those of keys and values, and pages of states.

A page (state_layout.py) is to a recurrent layer what windowed blocks are to one with a window of two tokens:
a token at position p reads that of position p - 1 and leaves its own. All that holds, hands off, caches and
counts windowed blocks (window_groups.py) holds pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.window_groups import MOST_RINGS, WindowGroups

WINDOW = 2
"""Tokens that a recurrent layer reads: the present one, and the one whose states are there."""
LARGE_PAGE = 8
"""Blocks of a page from which on larger blocks are better."""


@dataclass(frozen=True)
class StateGroups(WindowGroups):
    """Groups of which the second is pages: `tables` blocks each. Layers that attend have their place."""

    def ring_places(self, chunk: int, block_size: int) -> tuple[int, int]:
        """Return the places of the shortest ring of pages and of the longest, as `WindowGroups.ring_places`.

        Those of two places are enough, however long a chunk is: a step reads one page before it writes any.
        The longest ring has fewer places where pages are large.
        """
        shortest = self.kept(block_size)
        chunks = self.span(chunk, block_size) // max(1, self.tables // LARGE_PAGE)
        return shortest, MOST_RINGS * max(shortest, chunks)


def state_groups(attends: Sequence[bool], page_blocks: int) -> StateGroups:
    """Return the groups of a model of whose layers these attend, whose pages take `page_blocks` blocks."""
    slots = [sum(attends[:layer]) for layer in range(len(attends))]
    places = tuple((0, slot) if one else (1, 0) for slot, one in zip(slots, attends, strict=True))
    return StateGroups(WINDOW, sum(attends), page_blocks, places)
