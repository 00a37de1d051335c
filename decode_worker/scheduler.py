"""Which sequences run the next decode step, who gets a block, and who must give its blocks back.

Pure: plain counts in, a frozen `StepPlan` out. The growth rule, in the order in which it is applied:

1. Every running sequence whose next token starts a new block needs one block.
2. While the pool cannot give them, the newest sequence is preempted: it has the least to lose, and the
   oldest always gets on, so the batch makes progress. One goes at a time, and then the plan is made again:
   what it held may be shared, or lie under somebody's prefix, and not come free with it. A sequence whose
   worst case was reserved at its grant holds all its blocks already: it never needs one and is never chosen.
3. If the oldest alone still cannot grow, the rest is held by grants that prefill workers are still filling:
   the newest of those is aborted. Its blocks come back when its writer has stopped, so the sequence sits
   this step out; while enough blocks are on that way back, nothing more is taken from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.messages import Key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that wants to take part in the step.

    `tokens` counts prompt and output, the token to be computed included; `blocks` is what it holds;
    `joined` orders candidates by age (lower is older); `reserved` says that `blocks` covers its worst case.
    """

    key: Key
    tokens: int
    blocks: int
    joined: int
    reserved: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`run` in batch order; `grow` lists the keys in `run` that get one more block before the step.

    If it names nobody to run but somebody to preempt, plan again once that is done.
    """

    run: tuple[Key, ...]
    grow: tuple[Key, ...]
    preempt: tuple[Key, ...]
    abort_newest_grant: bool


def plan_step(
    candidates: Sequence[Candidate],
    *,
    free_blocks: int,
    block_size: int,
    max_batch: int,
    grants: int,
    quarantined: int,
) -> StepPlan:
    """Plan one step over `candidates`; at most `max_batch` of them run, the oldest first.

    `free_blocks` is what the pool can give now (evictable cache included), `grants` how many grants are
    being filled by prefill workers, `quarantined` how many blocks wait for their writer's word. Candidates
    beyond `max_batch` wait and keep their blocks, but are the first to lose them.
    """
    alive = sorted(candidates, key=lambda candidate: candidate.joined)
    batch = alive[:max_batch]
    needy = [c for c in batch if c.blocks * block_size < c.tokens]
    if len(needy) <= free_blocks:
        return StepPlan(_keys(batch), _keys(needy), (), abort_newest_grant=False)
    victim = next((c for c in reversed(alive) if not c.reserved), None)
    if victim is not None and victim is not alive[0]:
        return StepPlan((), (), (victim.key,), abort_newest_grant=False)
    fed, starving = needy[:free_blocks], needy[free_blocks:]
    wait = quarantined >= len(starving)
    # If nothing is on its way back and nothing can be called back, waiting would be for ever: the sequence
    # returns to the gateway, which prefills it again when there is room.
    preempt = starving if not wait and not grants else []
    run = [c for c in batch if c not in starving]
    return StepPlan(_keys(run), _keys(fed), _keys(preempt), abort_newest_grant=not wait and bool(grants))


def _keys(candidates: Sequence[Candidate]) -> tuple[Key, ...]:
    return tuple(candidate.key for candidate in candidates)
