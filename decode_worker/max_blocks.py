"""The most blocks that an attempt can need, which are reserved after it was preempted too often."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVLayout
from diptych.worker_process.attempt import Attempt


@dataclass(frozen=True, slots=True)
class MaxBlocks:
    """Blocks that are enough for `groups` of an attempt's step groups."""

    blocks: int
    """Number of blocks, those of its prompt included."""
    groups: int
    windowed: int = 0
    """Number of windowed blocks beside those of the prompt, where layers with a window have their own."""


def max_blocks(attempt: Attempt, *, layout: KVLayout, total_blocks: int) -> MaxBlocks:
    """Return the most blocks that an attempt can need, and for how many of its step groups they are enough.

    They are reserved for an attempt that was preempted too often to be at risk again. Sequences share the
    full blocks of what is prefilled; from there on each needs its own. If all step groups together need more
    than the pool has, it is as many as fit, but at least one. A beam search is one step group; it gets the
    whole pool if its beams could need more, which they seldom do.
    """
    prefilled = len(attempt.prompt_ids) + len(attempt.delivered_ids)
    shared = prefilled // layout.block_size
    own = -(-(len(attempt.prompt_ids) + attempt.max_tokens) // layout.block_size) - shared
    windowed = kept = 0
    if (windows := layout.windows) is not None:
        # One place more than it keeps, while it goes on to the next.
        windowed = windows.tables * min(max(own, 0), windows.kept(layout.block_size) + 1)
        kept = windows.tables * min(shared + 1, windows.kept(layout.block_size))
    room = total_blocks - shared - kept
    if attempt.beam_width:
        beams = max(1, min(attempt.beam_width, room // (own + windowed))) if windowed else attempt.beam_width
        most = min(shared + beams * own, total_blocks)
        return MaxBlocks(max(shared + own, most), 1, beams * windowed)
    count = len(attempt.choices)
    if own > 0:
        count = max(1, min(count, room // (own + windowed)))
    return MaxBlocks(shared + count * own, count, count * windowed)
