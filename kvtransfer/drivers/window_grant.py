"""The two tables of a grant where layers with a window lie in blocks of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.window_table import PromptWindow


def split_grant(
    layout: KVLayout, num_tokens: int, block_ids: Sequence[int], cached_tokens: int, pins: Sequence[int]
) -> tuple[list[int], PromptWindow | None]:
    """Return the full blocks of a grant for `num_tokens` tokens, and its windowed ones; without groups of
    layers all of them are full.
    """
    if layout.windows is None:
        return list(block_ids), None
    places = layout.blocks_for(num_tokens)
    cached = cached_tokens // layout.block_size
    return list(block_ids[:places]), PromptWindow(
        layout.windows.tables, list(pins), list(block_ids[places:]), cached
    )


def window_runs(
    layout: KVLayout, num_tokens: int, own: PromptWindow, granted: PromptWindow
) -> Iterator[tuple[int, list[int]]]:
    """Yield what a writer that copies sends of its windowed blocks once a prompt is computed: runs of its own
    blocks, each with the index of the first of the targets in the grant's table.
    """
    windows, size = layout.windows, layout.block_size
    if windows is None:
        return
    places = layout.blocks_for(num_tokens)
    first = max(granted.cached_places, windows.first_kept(num_tokens - 1, size))
    run: list[int] = []
    begin = 0
    for place in range(first, places):
        index = granted.ring_index(place)
        if run and index != begin + len(run):
            yield places + begin, run
            run = []
        if not run:
            begin = index
        run = [*run, *own.blocks(place)]
    if run:
        yield places + begin, run
