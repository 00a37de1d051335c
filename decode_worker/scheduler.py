"""Which sequences run the next decode step, who gets blocks, and who must give its blocks back.

Pure: plain counts in, a frozen `StepPlan` out. What is planned is a gang: the sequences that step together
or not at all (one of an ordinary choice, all live beams of a search). Step groups are in line by priority, then by
age. The growth rule, in the order in which it is applied:

1. A sequence whose next token starts a new block needs one block. So does one whose next token would be
   written to a block that others hold too: it gets a copy, and the last of them to be served keeps the block.
2. While the pool cannot give them, the last gang in line is preempted: among equals it has the least to lose,
   and the first always gets on, so the batch makes progress. One goes at a time, and then the plan is made
   again: what it held may be shared, or lie under somebody's prefix, and not come free with it. A gang whose
   worst case was reserved at its grant is never chosen.
3. If the first alone still cannot grow, the rest is held by grants that prefill workers are still filling:
   the newest of those is aborted. Its blocks come back when its writer has stopped, so the gang sits this
   step out; while enough blocks are on that way back, nothing more is taken from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A gang that wants to take part in the step; `joined` names it and tells its age (lower is older)."""

    joined: int
    rows: int = 1
    """Sequences, each a row of the step."""
    growth: int = 0
    """Blocks that it needs whatever the others do."""
    shared: tuple[int, int] | None = None
    """A block that it would write to, and how often that is held: it needs a copy while others have it."""
    reserved: bool = False
    """Its worst case was granted with it: it grows on that, and is never the victim."""
    priority: int = 0
    """A higher one is further in front."""


class StepPlan(NamedTuple):
    """`run` in batch order; `grow` lists those of `run` that may get blocks before the step.

    If it names nobody to run but somebody to preempt, plan again once that is done.
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
    being filled by prefill workers, `quarantined` how many blocks wait for their writer's word. Step groups for
    which the batch has no room wait and keep their blocks, but are the first to lose them. The first in line
    runs even if it is larger than a batch.
    """
    alive = sorted(candidates, key=lambda one: (-one.priority, one.joined))
    batch = _fitting(alive, max_batch)
    run, grow, missing = _feed(batch, free_blocks)
    if not missing:
        return StepPlan(run, grow, (), abort_newest_grant=False)
    victim = next((c for c in reversed(alive) if not c.reserved), None)
    if victim is not None and victim is not alive[0]:
        return StepPlan((), (), (victim.joined,), abort_newest_grant=False)
    wait = quarantined >= missing
    # If nothing is on its way back and nothing can be called back, waiting would be for ever: the gang
    # returns to the gateway, which prefills it again when there is room.
    starving = tuple(c.joined for c in batch if c.joined not in run)
    preempt = starving if not wait and not grants else ()
    return StepPlan(run, grow, preempt, abort_newest_grant=not wait and bool(grants))


def _fitting(alive: Sequence[Candidate], max_batch: int) -> list[Candidate]:
    """The first gangs whose rows fit. One that does not fit lets others pass until it does."""
    batch: list[Candidate] = []
    room = max_batch
    for candidate in alive:
        if candidate.rows <= room or not batch:
            batch.append(candidate)
            room -= candidate.rows
    return batch


def _feed(batch: Sequence[Candidate], free: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Who runs, who of them gets blocks, and how many blocks are missing for the others."""
    run, grow, starved = [], [], 0
    holders: dict[int, int] = {}
    for candidate in batch:
        need, copied = candidate.growth, None
        if candidate.shared is not None:
            block, held = candidate.shared
            if holders.setdefault(block, held) > 1:
                need, copied = need + 1, block
        if need > free:
            starved += need
            continue
        run.append(candidate.joined)
        free -= need
        if need or candidate.reserved:
            grow.append(candidate.joined)
        if copied is not None:
            holders[copied] -= 1
    return tuple(run), tuple(grow), starved - free if starved else 0
