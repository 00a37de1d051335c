"""The router's choice of a prefill and a decode worker: plain values in, one frozen decision out.

Every pair gets one cost, in the unit "prompt tokens to prefill", and the cheapest pair wins:

- the prompt tokens that the pair has to compute, and those that it has to move first (pair_savings.py);
- the tokens that already wait for the prefill worker;
- what one more sequence costs next to those that the decode worker runs or expects;
- the tokens by which the decode worker's free blocks fall short: the request would wait for them.

Equal costs are decided by a hash of (session or request, worker): a session stays where it was, and several
gateways with the same view do not all send to the first worker of the list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.attempt.types import LocalPrefill, Role
from gateway.worker_pool.pair_savings import held_blocks, pair_saving

QUEUED_TOKEN_COST = 1.0  # a token that waits already is computed first
SEQUENCE_COST = 24.0  # tokens of prefill that one more neighbour in the decode batch is worth
MISSING_TOKEN_COST = 4.0  # waiting for other requests' blocks is worse than recomputing
BY_COST = "cost"
WITHOUT_INDEX = "cost_without_index"  # the directory is unreachable: the last known copy decides
POLICIES = (BY_COST, WITHOUT_INDEX)
ONLY_CHOICE, PREFIX, LOAD = REASONS = ("only_choice", "prefix", "load")


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker that is linked now, with its load as best known."""

    worker_id: str
    kv_format: str  # pairs work only where these are equal
    waiting_tokens: int
    memory_domain: str = ""  # equal for workers that compute in one memory; others copy blocks
    cached_blocks: int = 0  # leading blocks of this prompt in its own prefix cache, where blocks are copied
    pull_cost: float | None = (
        None  # of a token from a decode worker's pool, in tokens to compute; None = never
    )


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode worker that is linked now, with its load as best known."""

    worker_id: str
    kv_format: str
    block_size: int  # tokens
    max_tokens: int  # prompt and output that one request may have there
    free_blocks: int  # free or evictable
    sequences: int  # running, or expected by this gateway
    cached_blocks: int = 0  # leading blocks of this prompt in its prefix cache
    memory_domain: str = ""  # as of prefill workers


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The needs of an attempt. ``tokens``: how many have KV before the next one is sampled.

    ``affinity`` decides between equal pairs: the same one goes to the same worker.
    """

    affinity: str
    tokens: int
    worst_case_tokens: int  # with the whole output
    avoid: frozenset[str] = frozenset()
    remote: bool = False  # it needs a prefill worker: a decode worker answered that too many tokens are new
    after_loss: bool = False  # an attempt before it was lost: no worker may get it that may have died, too
    suspects: tuple[tuple[str, float], ...] = ()  # workers that may have died under it, with the time


@dataclass(frozen=True, slots=True)
class Route:
    """The pair that was chosen, and the reason (one of `REASONS`).

    Without a prefill worker the decode worker computes the prompt itself: see `local_prefill`.
    """

    prefill_id: str | None
    decode_id: str
    reason: str
    matched_blocks: int
    cost: float
    local: LocalPrefill = LocalPrefill.NO


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker of this role can take the request."""

    role: Role


@dataclass(frozen=True, slots=True)
class NoProof:
    """Workers can take the request, but none of a pair was heard of since the last loss of a worker.

    Or one of its suspects was neither heard of nor lost since.
    """


@dataclass(frozen=True, slots=True)
class NoAdapter:
    """Workers are there, and none of a role has the adapter of the request or could load it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A route, with the key of the block hashes on its decode worker and the values for the telemetry."""

    route: Route
    policy: str
    cache_namespace: bytes = field(repr=False)
    predicted_tokens: int  # prompt tokens that are cached according to the prefix index

    @property
    def prefill_id(self) -> str | None:
        return self.route.prefill_id

    @property
    def decode_id(self) -> str:
        return self.route.decode_id

    @property
    def attributes(self) -> dict[str, str | int]:
        """Attributes of the span of the choice."""
        return {
            "diptych.route.policy": self.policy,
            "diptych.route.reason": self.route.reason,
            "diptych.route.matched_blocks": self.route.matched_blocks,
            "diptych.route.prefill_worker": self.prefill_id or "",
            "diptych.route.decode_worker": self.decode_id,
        }


def choose_route(
    request: RouteRequest, prefill: Iterable[PrefillCandidate], decode: Iterable[DecodeCandidate]
) -> Route | NoWorker:
    """Return the cheapest pair, or the role that has no candidate (decode also when no pool or pair fits)."""
    sources = [p for p in prefill if p.worker_id not in request.avoid]
    if not sources:
        return NoWorker(Role.PREFILL)
    targets = [
        d for d in decode if d.worker_id not in request.avoid and d.max_tokens >= request.worst_case_tokens
    ]
    pairs = [(p, d) for p in sources for d in targets if p.kv_format == d.kv_format]
    if not pairs:
        return NoWorker(Role.DECODE)
    source, target = min(
        pairs, key=lambda pair: (_cost(request, *pair), _tie(request.affinity, *pair), pair[1].worker_id)
    )
    return Route(
        source.worker_id,
        target.worker_id,
        reason=_reason(request, pairs, (source, target)),
        matched_blocks=pair_saving(request.tokens, source, target).blocks,
        cost=_cost(request, source, target),
    )


def _cost(request: RouteRequest, prefill: PrefillCandidate, decode: DecodeCandidate) -> float:
    needed = -(-request.tokens // decode.block_size) - usable_blocks(request, decode)
    missing = max(0, needed - decode.free_blocks) * decode.block_size
    saving = pair_saving(request.tokens, prefill, decode)
    return (
        saving.compute_cost(request.tokens, decode.block_size, prefill.pull_cost)
        + QUEUED_TOKEN_COST * prefill.waiting_tokens
        + SEQUENCE_COST * decode.sequences
        + MISSING_TOKEN_COST * missing
    )


def usable_blocks(request: RouteRequest, decode: DecodeCandidate) -> int:
    """Return the blocks of the prompt that the decode worker holds; one token is always computed."""
    return held_blocks(request.tokens, decode)


def _tie(affinity: str, prefill: PrefillCandidate, decode: DecodeCandidate) -> bytes:
    name = "\0".join((affinity, prefill.worker_id, decode.worker_id))
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _reason(
    request: RouteRequest,
    pairs: Sequence[tuple[PrefillCandidate, DecodeCandidate]],
    chosen: tuple[PrefillCandidate, DecodeCandidate],
) -> str:
    if len(pairs) == 1:
        return ONLY_CHOICE
    saved = pair_saving(request.tokens, *chosen).blocks
    others = [pair_saving(request.tokens, *pair).blocks for pair in pairs if pair != chosen]
    return PREFIX if saved > min(others) and saved >= max(others) else LOAD
