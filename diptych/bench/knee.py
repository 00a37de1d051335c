"""The load beyond which more load buys little throughput and much latency."""

from __future__ import annotations

from collections.abc import Sequence


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the (throughput, latency) pair of the greatest power, which is throughput over latency.

    Kleinrock's definition ("Power and deterministic rules of thumb for probabilistic problems in computer
    communications", ICC 1979): left of it the server idles, right of it requests mostly wait. `points` are
    in order of load. None for less than three points, for points without a positive latency, and when the
    last one has the greatest power: that load was still below the knee.
    """
    if len(points) < 3 or any(not latency > 0 for _, latency in points):
        return None
    power = [throughput / latency for throughput, latency in points]
    best = power.index(max(power))
    return None if best == len(points) - 1 else best
