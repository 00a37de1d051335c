"""Layers and places of full and windowed blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.kv.window_groups import WindowGroups, window_groups


def test_layers_with_a_window_lie_beside_those_without() -> None:
    groups = window_groups((9, 9, None, 9, 9, None))
    assert groups == WindowGroups(9, 2, 2, ((1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1)))
    assert groups.blocks_per_place == 3


@pytest.mark.parametrize(
    "windows", [(None, None), (8,), (8, 9, None), (None, None, 8)], ids=["none", "one layer", "two", "few"]
)
def test_models_that_one_block_serves_have_no_groups(windows: tuple[int | None, ...]) -> None:
    assert window_groups(windows) is None


def test_where_all_layers_have_a_window_an_eighth_is_in_full_blocks() -> None:
    groups = window_groups((4096,) * 32)
    assert groups is not None
    assert (groups.slots, groups.tables) == (4, 7)


@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.integers(0, 300))
def test_the_ring_holds_what_a_chunk_reads_and_what_is_kept(
    window: int, chunk: int, size: int, start: int
) -> None:
    groups = window_groups((window, None))
    assert groups is not None
    end = start + chunk
    last = (end - 1) // size
    assert last - groups.first_read(start, size) < groups.span(chunk, size)
    assert last - groups.first_kept(end - 1, size) < min(groups.kept(size), groups.span(chunk, size))
    assert groups.first_kept(end - 1, size) <= groups.first_read(end, size), "the next token finds all"
    assert groups.span(chunk, size) * size <= window + chunk + 2 * size
