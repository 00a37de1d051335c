"""Rules for the choice of a pair of workers: the product's own, and those that it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.router import NoWorker, Route, RouteRequest, choose_route


class Routing(Enum):
    """Rule by which requests are given to workers."""

    COST = "cost"
    """The gateway's router."""
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LONGEST_PREFIX = "longest-prefix"
    """The decode worker that really holds most of the prompt, and the shortest queue of prompts."""


@dataclass(slots=True)
class Chooser:
    """The choices of one replay, the same each time."""

    routing: Routing
    _turn: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def choose(
        self,
        request: RouteRequest,
        prefill: Sequence[PrefillCandidate],
        decode: Sequence[DecodeCandidate],
        truly_cached: Mapping[int, int],
        local: Callable[[Route], Route | None] | None = None,
    ) -> tuple[int | None, int]:
        """Return the positions of the chosen workers; `truly_cached` counts chunks by decode worker.

        With the gateway's rule `local` may give a decode worker alone in place of a pair.
        """
        if self.routing is Routing.COST:
            route = choose_route(request, prefill, decode)
            if isinstance(route, NoWorker) or route.prefill_id is None:
                raise ValueError(f"no pair of workers takes a request of {request.worst_case_tokens} tokens")
            chosen = (None if local is None else local(route)) or route
            prefill_id = chosen.prefill_id
            return None if prefill_id is None else int(prefill_id[1:]), int(chosen.decode_id[1:])
        if self.routing is Routing.RANDOM:
            return self._random.randrange(len(prefill)), self._random.randrange(len(decode))
        if self.routing is Routing.ROUND_ROBIN:
            self._turn += 1
            return self._turn % len(prefill), self._turn % len(decode)
        return (
            min(range(len(prefill)), key=lambda one: prefill[one].waiting_tokens),
            max(range(len(decode)), key=lambda one: (truly_cached.get(one, 0), -decode[one].sequences)),
        )
