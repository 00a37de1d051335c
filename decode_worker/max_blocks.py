"""Blocks that an attempt can come to need, for those that were preempted too often to be at risk again.

Pure. Sequences share the full blocks of what is prefilled; from there on each needs its own.
"""

from __future__ import annotations

from diptych.worker_process.attempt import Attempt


def worst_case(attempt: Attempt, *, block_size: int, total_blocks: int) -> tuple[int, int]:
    """Blocks to reserve, and for how many of the attempt's gangs they are enough.

    If all together need more than the pool has, it is as many as fit, but at least one. A beam search is one
    gang; it gets the whole pool if its beams could come to need more, which they seldom do.
    """
    prefilled = len(attempt.prompt_ids) + len(attempt.delivered_ids)
    shared = prefilled // block_size
    own = -(-(len(attempt.prompt_ids) + attempt.max_tokens) // block_size) - shared
    if attempt.beam_width:
        return max(shared + own, min(shared + attempt.beam_width * own, total_blocks)), 1
    count = len(attempt.choices)
    if own > 0:
        count = max(1, min(count, (total_blocks - shared) // own))
    return shared + count * own, count
