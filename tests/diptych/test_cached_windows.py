"""Usable lengths of cached prefixes, against the rule spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.cached_windows import usable_places, window_mark
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.runtime.block_hash import block_keys

KEYS = block_keys(bytes(32), list(range(160)), 4)


@given(st.integers(0, 40), st.integers(0, 5), st.sets(st.integers(0, 39)))
def test_the_longest_prefix_with_all_windowed_blocks_before_its_end(
    end: int, reach: int, cached: set[int]
) -> None:
    marks = {window_mark(KEYS[place]) for place in cached}
    usable = [n for n in range(end + 1) if all(place in cached for place in range(max(0, n - reach), n))]
    assert usable_places(KEYS, end, reach, marks.__contains__) == max(usable)


def test_marks_are_no_keys_of_blocks() -> None:
    marks = {window_mark(key) for key in KEYS}
    assert len(marks) == len(KEYS)
    assert not marks & set(KEYS)
    assert {len(mark) for mark in marks} == {16}


@given(st.integers(1, 70), st.sampled_from([1, 4, 16]), st.integers(0, 40))
def test_the_reach_is_what_the_next_token_reads(window: int, size: int, end: int) -> None:
    groups = window_groups((window, None))
    assert isinstance(groups, WindowGroups)
    assert groups.first_read(end * size, size) == max(0, end - (groups.kept(size) - 1))
