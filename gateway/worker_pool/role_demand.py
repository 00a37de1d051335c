"""The number of workers that each role needs for the load of this moment. Pure.

Prefill: the time that its steps take now, at most `BUSY` of each worker, plus enough more to compute what
waits within the time that TTFT may take. What waits where workers are idle waits for blocks, not for them:
it counts by how busy they are.

Decode: the largest of three needs, for blocks, for places in batches and for steps short enough for ITL;
each leaves `SPARE` for growth. A gateway's queue counts here while blocks or places are nearly all taken,
for these are what its requests then wait for, and else with prefill.

It is the rule of Kubernetes' HorizontalPodAutoscaler (present number times metric over target) with metrics
of the two phases. Targets by default are those of MLPerf Inference's server scenario for Llama 2 70B: 2 s,
200 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BUSY = 0.8
"""Share of the time that a prefill worker computes at its target; with 1, its queue would grow for ever."""
SPARE = 0.9
"""Share of blocks and places that are taken at the target."""
FULL = 0.85
"""Share of them from which on waiting requests are taken to wait for more."""
TTFT_SHARE = 0.5
"""Part of the target of TTFT in which what waits is to be computed; the rest is for its own prompt."""


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Times that requests are to keep, in seconds."""

    ttft_s: float = 2.0
    itl_s: float = 0.2


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker: its share of time in steps, its waiting tokens, and its seconds a token."""

    busy_share: float
    waiting_tokens: int
    token_s: float


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode worker: blocks and places taken and there, and the seconds of a step as it runs now."""

    used_blocks: int
    total_blocks: int
    sequences: int
    max_sequences: int
    step_s: float


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """The queue of a gateway: requests, their prompts' tokens, and the blocks that they will need."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0


class Wanted(NamedTuple):
    """Workers that each role needs; fractions are for comparison."""

    prefill: float
    decode: float


def wanted_workers(
    prefill: Sequence[PrefillLoad],
    decode: Sequence[DecodeLoad],
    queued: QueuedLoad,
    targets: SloTargets,
) -> Wanted:
    """Return what the ready workers of each role should be; 0 of a role that has none."""
    full = _fullness(decode) >= FULL
    waits_for_prefill = 0 if full else queued.tokens
    waits_for_decode = queued if full else QueuedLoad()
    return Wanted(
        _wanted_prefill(prefill, waits_for_prefill, targets),
        _wanted_decode(decode, waits_for_decode, targets),
    )


def _fullness(decode: Sequence[DecodeLoad]) -> float:
    """Return the share of blocks or of places that is taken, whichever is more."""
    blocks = sum(one.total_blocks for one in decode)
    places = sum(one.max_sequences for one in decode)
    return max(
        sum(one.used_blocks for one in decode) / blocks if blocks else 0.0,
        sum(one.sequences for one in decode) / places if places else 0.0,
    )


def _wanted_prefill(workers: Sequence[PrefillLoad], queued_tokens: int, targets: SloTargets) -> float:
    if not workers:
        return 0.0
    computing = sum(one.busy_share for one in workers)
    token_s = min(one.token_s for one in workers)
    backlog_s = (queued_tokens + sum(one.waiting_tokens for one in workers)) * token_s
    return computing / BUSY + computing / len(workers) * backlog_s / (TTFT_SHARE * targets.ttft_s)


def _wanted_decode(workers: Sequence[DecodeLoad], queued: QueuedLoad, targets: SloTargets) -> float:
    count = len(workers)
    blocks = sum(one.total_blocks for one in workers)
    places = sum(one.max_sequences for one in workers)
    if not blocks:
        return 0.0
    taken = sum(one.sequences for one in workers) + queued.requests
    by_blocks = (sum(one.used_blocks for one in workers) + queued.blocks) / (SPARE * blocks)
    by_places = taken / (SPARE * places) if places else 0.0
    by_steps = sum(one.step_s for one in workers) / count / targets.itl_s
    return count * max(by_blocks, by_places, by_steps)
