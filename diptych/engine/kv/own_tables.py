"""Tables of a sequence that has all its blocks to itself and gives none up, as in one process alone."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.kv.kv_memory import KVLayout


def own_blocks(layout: KVLayout, num_tokens: int) -> int:
    """Return the blocks that `num_tokens` tokens take, windowed ones and pages of states included."""
    return layout.blocks_for(num_tokens) * layout.blocks_per_place


def own_tables(layout: KVLayout, blocks: Sequence[int]) -> tuple[Sequence[int], tuple[Sequence[int], ...]]:
    """Return `SequenceStep.block_table` and `window_tables` of a sequence that has so many blocks for each
    of its places.
    """
    places = len(blocks) // layout.blocks_per_place
    full, *windowed = (
        blocks[table * places : (table + 1) * places] for table in range(layout.blocks_per_place)
    )
    return full, tuple(windowed)
