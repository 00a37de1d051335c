"""Figures of a load: percentiles, the knee of its curve, and the service levels that answers meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.bench.request import Outcome


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of values in ascending order; nan for none. `percent` is from 0 to 100.

    It is interpolated between the two nearest ranks (Hyndman and Fan's R-7, as in numpy).
    """
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def find_knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the (throughput, latency) pair of the greatest power, throughput over latency.

    Beyond this load, more load buys little throughput and much latency. Kleinrock's definition ("Power and
    deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979): left of it
    the server idles, right of it requests mostly wait. `points` are in order of load. None for less than
    three points, for points without a positive latency, and when the last one has the greatest power: that
    load was still below the knee.
    """
    if len(points) < 3 or any(not latency > 0 for _, latency in points):
        return None
    power = [throughput / latency for throughput, latency in points]
    best = power.index(max(power))
    return None if best == len(points) - 1 else best


@dataclass(frozen=True)
class ServiceLevel:
    """Limits in milliseconds on one request; None does not bind. `e2el` is the time to the last output."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Return whether a request keeps every limit.

        A failed one keeps none; an answer of one token has no TPOT and meets every limit on it.
        """
        if outcome.reply is None:
            return False
        seen = ((self.ttft, outcome.ttft), (self.tpot, outcome.tpot or 0.0), (self.e2el, outcome.latency))
        return all(limit is None or 1000 * seconds <= limit for limit, seconds in seen)


def parse_service_level(texts: Sequence[str]) -> ServiceLevel:
    """Parse limits such as "ttft:500", "tpot:50", "e2el:4000". Raises ValueError."""
    limits: dict[str, float] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or name not in ("ttft", "tpot", "e2el") or name in limits:
            raise ValueError(f"{text!r} is not one of ttft:MS, tpot:MS, e2el:MS, each given once")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {value!r} is not a number of milliseconds") from None
        if not limits[name] > 0:
            raise ValueError(f"{text!r}: a limit is positive")
    return ServiceLevel(**limits)
