"""Pages of recurrent states that a sequence's share of a step reads and writes, and where its tokens are cut.

A token reads the page of the token before it and leaves its states in that of its own place
(kv/state_layout.py). Where two places of a chunk have one page, only the later one's states are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from diptych.engine.batch import SequenceStep

LOST_ROWS = "rows %s of a step read recurrent states that are not those before them"
"""Message of a step some of whose pages were those behind other tokens."""


class StateCut(NamedTuple):
    """A cut of a chunk: states behind it are kept, or guesses end there."""

    end: int
    """Tokens of the sequence's share of the step before it."""
    page: list[int] | None
    """Blocks of the page that gets the states behind it; None: behind guesses none are kept."""


def page_before(step: SequenceStep) -> list[int] | None:
    """Return the blocks of the page with the states before a share of a step; None before the first token."""
    return None if step.start == 0 else _page(step, (step.start - 1) // step.memory.layout.block_size)


def state_cuts(step: SequenceStep) -> list[StateCut]:
    """Return the cuts of a share of a step, the last of which is its end."""
    size, end = step.memory.layout.block_size, step.start + step.kept_tokens
    places = range(step.start // size, (end - 1) // size + 1)
    pages = [_page(step, place) for place in places]
    last = {tuple(page): place for place, page in zip(places, pages, strict=True)}
    cuts = [
        StateCut(min((place + 1) * size, end) - step.start, page)
        for place, page in zip(places, pages, strict=True)
        if last[tuple(page)] == place
    ]
    whole = len(step.token_ids)
    return cuts if step.kept_tokens == whole else [*cuts, StateCut(whole, None)]


def row_pages(step: SequenceStep) -> tuple[list[int] | None, list[int]]:
    """Return the pages that a share of one token reads, None before the first token, and writes."""
    size = step.memory.layout.block_size
    own = _page(step, step.start // size)
    return (own if step.start % size else page_before(step)), own


def page_tables(pages: Sequence[Sequence[int] | None], blocks: int, absent: int) -> list[int]:
    """Return pages of so many blocks one after the other, `absent` for each block of a missing one."""
    return [block for page in pages for block in ([absent] * blocks if page is None else page)]


def _page(step: SequenceStep, place: int) -> list[int]:
    """Return the blocks of a place's page."""
    return list(map(itemgetter(place - step.window_first), step.window_tables))
