"""Where an attempt goes: the router's choice with what the messages and the telemetry need of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.worker_pool.router import Route

BY_COST = "cost"
WITHOUT_INDEX = "cost_without_index"  # the directory is away: the last known copy decides


@dataclass(frozen=True, slots=True)
class Placement:
    """A route, and the key of the block hashes for the worker that it leads to."""

    route: Route
    policy: str
    cache_namespace: bytes = field(repr=False)
    predicted_tokens: int  # prompt tokens that the prefix index says are cached

    @property
    def prefill_id(self) -> str:
        return self.route.prefill_id

    @property
    def decode_id(self) -> str:
        return self.route.decode_id

    @property
    def attributes(self) -> dict[str, str | int]:
        """For the span of the choice."""
        return {
            "diptych.route.policy": self.policy,
            "diptych.route.reason": self.route.reason,
            "diptych.route.matched_blocks": self.route.matched_blocks,
            "diptych.route.prefill_worker": self.prefill_id,
            "diptych.route.decode_worker": self.decode_id,
        }
