"""Schedule of decode: the step groups of the next step, their new blocks, and preemptions.

Pure: plain counts in, a frozen `StepPlan` out. A step group is a set of sequences that step together or not
at all (one of an ordinary choice, all live beams of a search). Step groups are in line by priority, then by
arrival. The growth rule, in the order in which it is applied:

1. A sequence whose next token starts a new block needs one block. So does one whose next token would be
   written to a block that others hold too: it gets a copy, and the last of them to be served keeps the block.
2. While the pool cannot give them, the last group in line is preempted: among equals it has the least to
   lose, and the first always advances, so the batch makes progress. One is preempted at a time, and then the
   plan is made again: its blocks may be shared, or lie under another prefix, and not become free with it. A
   group whose worst case was reserved at its grant is never chosen.
3. If the first alone still cannot grow, the rest is held by grants that prefill workers are still filling:
   the newest of those is aborted. Its blocks come back when its writer has stopped, so the group sits this
   step out; while enough blocks are coming back in that way, nothing more is preempted or aborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A step group that wants to take part in the step; `arrival_order` identifies it (lower is older)."""

    arrival_order: int
    rows: int = 1
    """Sequences, each a row of the step."""
    growth: int = 0
    """Blocks that it needs in any case."""
    shared: tuple[int, int] | None = None
    """A block that it would write to, and its number of holders: it needs a copy while others hold it."""
    reserved: bool = False
    """True if its worst case was reserved at its grant: it grows on that, and is never the victim."""
    priority: int = 0
    """Higher is further in front."""
    copies: int = 1
    """Blocks that a copy of `shared` takes."""


class StepPlan(NamedTuple):
    """`run` in batch order; `grow` lists those of `run` that may get blocks before the step.

    If `run` is empty and `preempt` is not, plan again once the preemption is done.
    """

    run: tuple[int, ...]
    grow: tuple[int, ...]
    preempt: tuple[int, ...]
    abort_newest_grant: bool


def plan_step(
    candidates: Sequence[Candidate], *, free_blocks: int, max_batch: int, grants: int, quarantined: int
) -> StepPlan:
    """Plan one step over `candidates`; at most `max_batch` sequences of them run, those of the first in line.

    `free_blocks` is what the pool can give now (evictable cache included), `grants` how many grants are
    being filled by prefill workers, `quarantined` how many blocks wait for their writer to stop. Step groups
    for which the batch has no room wait and keep their blocks, but are the first to lose them. The first in
    line runs even if it is larger than a batch.
    """
    alive = sorted(candidates, key=lambda one: (-one.priority, one.arrival_order))
    batch = _fitting(alive, max_batch)
    run, grow, missing = _feed(batch, free_blocks)
    if not missing:
        return StepPlan(run, grow, (), abort_newest_grant=False)
    victim = next((c for c in reversed(alive) if not c.reserved), None)
    if victim is not None and victim is not alive[0]:
        return StepPlan((), (), (victim.arrival_order,), abort_newest_grant=False)
    wait = quarantined >= missing
    # If no blocks are coming back and no grant can be aborted, the wait would have no end: the group returns
    # to the gateway, which prefills it again when there is room.
    starving = tuple(c.arrival_order for c in batch if c.arrival_order not in run)
    preempt = starving if not wait and not grants else ()
    return StepPlan(run, grow, preempt, abort_newest_grant=not wait and bool(grants))


def _fitting(alive: Sequence[Candidate], max_batch: int) -> list[Candidate]:
    """Return the first groups whose rows fit. One that does not fit lets others pass until it does."""
    batch: list[Candidate] = []
    room = max_batch
    for candidate in alive:
        if candidate.rows <= room or not batch:
            batch.append(candidate)
            room -= candidate.rows
    return batch


def _feed(batch: Sequence[Candidate], free: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the groups that run, those of them that get blocks, and the blocks missing for the others."""
    run, grow, starved = [], [], 0
    holders: dict[int, int] = {}
    for candidate in batch:
        need, copied = candidate.growth, None
        if candidate.shared is not None:
            block, held = candidate.shared
            if holders.setdefault(block, held) > 1:
                need, copied = need + candidate.copies, block
        if need > free:
            starved += need
            continue
        run.append(candidate.arrival_order)
        free -= need
        if need or candidate.reserved:
            grow.append(candidate.arrival_order)
        if copied is not None:
            holders[copied] -= 1
    return tuple(run), tuple(grow), starved - free if starved else 0
