"""The router's choice of a prefill and a decode worker: plain values in, one frozen decision out.

Every pair gets one cost, in the unit "prompt tokens to prefill", and the cheapest pair wins:

- the prompt tokens that the pair has to compute, and those that it has to move or to load from a tier first
  (pair_savings.py);
- the tokens that already wait for the prefill worker;
- what one more sequence costs next to those that the decode worker runs or expects;
- the tokens by which the decode worker's free blocks fall short: the request would wait for them.

`gateway.worker_pool.cheapest_pair` finds it, and decides between pairs of equal cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.attempt.types import EncoderRoute, LocalPrefill, Role
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.cheapest_pair import cheapest_pair
from gateway.worker_pool.pair_savings import held_blocks

BY_COST = "cost"
WITHOUT_INDEX = "cost_without_index"  # the directory is unreachable: the last known copy decides
POLICIES = (BY_COST, WITHOUT_INDEX)
ONLY_CHOICE, PREFIX, LOAD = REASONS = ("only_choice", "prefix", "load")


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
    images_end: int = 0  # position after the last row of an image, which prefill workers alone compute
    suspected_at: float = -math.inf  # when its last suspect was named: encode workers may have died, too


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
    encode_id: str | None = None  # None: nothing is to be encoded, or the prefill worker does it

    @property
    def prefill_id(self) -> str | None:
        return self.route.prefill_id

    @property
    def decode_id(self) -> str:
        return self.route.decode_id

    @property
    def encoder(self) -> EncoderRoute | None:
        """The encode worker, and what the prefill worker has to know of it."""
        return None if self.encode_id is None else EncoderRoute(self.encode_id, self.predicted_tokens)

    @property
    def attributes(self) -> dict[str, str | int]:
        """Attributes of the span of the choice."""
        encode: dict[str, str | int] = (
            {} if self.encode_id is None else {"diptych.route.encode_worker": self.encode_id}
        )
        return encode | {
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
    found = cheapest_pair(request.affinity, request.tokens, sources, targets)
    if found is None:
        return NoWorker(Role.DECODE)
    source, target = found.pair
    reason = ONLY_CHOICE if found.only else PREFIX if found.saves_most else LOAD
    return Route(source.worker_id, target.worker_id, reason, found.saving.blocks, found.cost)


def usable_blocks(request: RouteRequest, decode: DecodeCandidate) -> int:
    """Return the blocks of the prompt that the decode worker holds; one token is always computed."""
    return held_blocks(request.tokens, decode)
