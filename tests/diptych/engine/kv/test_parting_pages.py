"""Pages where prompts part: those that a prompt enters for later ones, whatever came and went meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diptych.cached_windows import window_mark
from diptych.engine.kv.block_pool import BlockMisuse, BlockPool
from diptych.engine.kv.state_groups import state_groups
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.engine.kv.window_table import PromptWindow

PLACES = 21  # of a prompt, the last one not full
GROUPS = state_groups([False, True], 1)
SIZE = 4
KEYS = [bytes((place, 0)) for place in range(PLACES - 1)]


def publish(pool: BlockPool, blocks: Sequence[int], end: int) -> None:
    """Enter the first full blocks of a prompt that others may have entered."""
    for place in range(end):
        pool.insert(blocks[place], KEYS[place], KEYS[place - 1] if place else b"")


def enter(before: int, then: int) -> dict[int, int]:
    """Compute a prompt that shares `before` places with others when it begins and `then` when it ends.

    Return the places whose pages it entered, each with the place whose states its page has.
    """
    pool = BlockPool(100)
    prefix = WindowPrefix(pool, GROUPS, SIZE)
    other = pool.allocate(PLACES)
    publish(pool, other, before)
    tail = prefix.tail(KEYS, 0, PLACES)
    own = pool.allocate(PLACES)
    ring = GROUPS.ring_of(pool.allocate(GROUPS.ring_blocks(PLACES, 8, SIZE, tail)), PLACES, tail)
    window = PromptWindow(GROUPS.tables, [], ring, 0)
    content = {window.blocks(place)[0]: place for place in range(PLACES)}
    pool.forget(KEYS[then : then + 1])
    publish(pool, other, then)
    publish(pool, own, len(KEYS))
    for place in range(GROUPS.first_kept(PLACES * SIZE - 2, SIZE), len(KEYS)):
        prefix.insert(window.blocks(place), KEYS[place])
    prefix.insert_shared(window, own, KEYS)
    found = ((place, pool.place_of(window_mark(key))) for place, key in enumerate(KEYS))
    return {place: content[at[0]] for place, at in found if at is not None}


@pytest.mark.parametrize("before", range(PLACES))
def test_no_page_is_entered_whose_states_are_those_of_another_place(before: int) -> None:
    """Other prompts that share more are published while this one is computed, or those it shares go."""
    for then in range(PLACES):
        entered = enter(before, then)
        assert entered == {place: place for place in entered}
        parts = {then - 1} if then == before and then else set()
        assert set(entered) >= {PLACES - 2, *parts}, "the end of the prompt, and where it parts"


def test_pages_that_later_places_took_would_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: were every place of a ring taken for one that is there."""
    monkeypatch.setattr(PromptWindow, "lasting", lambda self, first, places: range(first, places))
    with pytest.raises(BlockMisuse):
        enter(5, 12)
    assert enter(5, 13)[12] != 12


def test_a_prompt_that_enters_nothing_has_no_parting_page() -> None:
    """Give it keys that end before its cached prefix, as those of a request that may not write the cache."""
    pool = BlockPool(100)
    own, pinned, ring = (pool.allocate(count * GROUPS.tables) for count in (PLACES, 1, 4))
    WindowPrefix(pool, GROUPS, SIZE).insert_shared(PromptWindow(GROUPS.tables, pinned, ring, 3), own, [])
    assert not pool.cached()
