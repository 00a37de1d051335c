"""Figures of one replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diptych.replay.fleet import ReplayFleet
from diptych.replay.histogram import Histogram

PERCENTILES = (50, 90, 99)


@dataclass
class ReplayResult:
    """Counts and times of all requests of a replay."""

    fleet: ReplayFleet
    requests: int = 0
    completed: int = 0
    good: int = 0
    """Answers within the service level."""
    refused: int = 0
    """Requests that admission refused: the queue was full, or the predicted wait too long."""
    too_long: int = 0
    """Requests longer than one may be, or than a pool."""
    preempted: int = 0
    local: int = 0
    """Prompts that decode workers computed."""
    input_tokens: int = 0
    """Tokens of all admitted prompts."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were cached at the grant."""
    best_cached_tokens: int = 0
    """Prompt tokens that the best worker held when the pair was chosen: what an oracle would have found."""
    last_arrival_s: float = 0.0
    """Virtual time of the last arrival; the first is at 0."""
    last_s: float = 0.0
    """Virtual time of the last token."""
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    mean_batch: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second that arrived."""
        return self.requests / self.last_arrival_s if self.last_arrival_s else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second that are answered within the service level.

        It is a share of the rate at which they arrive: the time that the last answers take says nothing.
        """
        return self.rate * self.attainment

    @property
    def goodput_per_worker(self) -> float:
        return self.goodput / self.fleet.workers

    @property
    def attainment(self) -> float:
        """Share of all requests that are answered within the service level."""
        return self.good / self.requests if self.requests else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the admitted prompts' tokens that were cached."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def best_hit_rate(self) -> float:
        """Share that an oracle would have found: the best worker for each request."""
        return self.best_cached_tokens / self.input_tokens if self.input_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures as values for JSON; latencies are in milliseconds."""
        found: dict[str, Any] = {
            "prefill_workers": self.fleet.prefill,
            "decode_workers": self.fleet.decode,
            "routing": self.fleet.routing.value,
            "requests": self.requests,
            "completed": self.completed,
            "within_service_level": self.good,
            "refused": self.refused,
            "too_long": self.too_long,
            "preempted": self.preempted,
            "local_prefills": self.local,
            "duration_s": self.last_s,
            "output_tokens_per_s": self.output_tokens / self.last_s if self.last_s else 0.0,
            "rate": self.rate,
            "goodput": self.goodput,
            "goodput_per_worker": self.goodput_per_worker,
            "attainment": self.attainment,
            "hit_rate": self.hit_rate,
            "best_hit_rate": self.best_hit_rate,
            "prefill_busy": self.prefill_busy,
            "decode_busy": self.decode_busy,
            "mean_batch": self.mean_batch,
        }
        for name, times in (("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl)):
            for percent in PERCENTILES:
                value = times.percentile(percent)
                found[f"p{percent}_{name}_ms"] = None if value is None else 1000 * value
        return found
