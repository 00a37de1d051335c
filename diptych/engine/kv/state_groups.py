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

    def ring_blocks(self, places: int, chunk: int, block_size: int, tail: int = 0) -> int:
        """Return the blocks of the pages in which a prompt is computed, as `WindowGroups.ring_blocks` does.

        Those of two places are enough, however long a chunk is: a step reads one page before it writes any.
        More are taken for fewer places where pages are large.
        """
        ring = self.kept(block_size)
        chunks = self.span(chunk, block_size) // max(1, self.tables // LARGE_PAGE)
        longest = MOST_RINGS * max(ring, chunks)
        return self.tables * min(places, tail if ring < tail <= longest else ring)


def state_groups(attends: Sequence[bool], page_blocks: int) -> StateGroups:
    """Return the groups of a model of whose layers these attend, whose pages take `page_blocks` blocks."""
    slots = [sum(attends[:layer]) for layer in range(len(attends))]
    places = tuple((0, slot) if one else (1, 0) for slot, one in zip(slots, attends, strict=True))
    return StateGroups(WINDOW, sum(attends), page_blocks, places)
