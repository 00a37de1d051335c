"""Load on a server, one point on the axis of a plot, and the times of its requests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

INFINITE = float("inf")


@dataclass(frozen=True)
class Load:
    """`max_concurrency` requests in flight at most (None: any number), sent at `request_rate` a second.

    An infinite rate with a concurrency is a closed loop: each client sends when its last answer ended.
    A finite one is an open loop, in which requests come whether or not the server keeps up.
    `request_rate` None replays a trace at its own times.
    """

    request_rate: float | None = INFINITE
    max_concurrency: int | None = None
    burstiness: float = 1.0
    think_s: float = 0.0
    """Mean seconds between an answer's end and the next request of a closed loop's client."""

    @property
    def closed(self) -> bool:
        return self.request_rate == INFINITE and self.max_concurrency is not None

    @property
    def label(self) -> str:
        """The load in a table: "C=8", "2 req/s", "2 req/s, C≤8"."""
        if self.closed:
            thinking = f", think {self.think_s:g} s" if self.think_s else ""
            return f"C={self.max_concurrency}{thinking}"
        rate = "trace" if self.request_rate is None else f"{self.request_rate:g} req/s"
        return rate if self.max_concurrency is None else f"{rate}, C≤{self.max_concurrency}"


def think_times(count: int, mean: float, seed: int) -> list[float]:
    """Return `count` exponential times of mean `mean` seconds."""
    rng = random.Random(f"think {seed}")
    return [rng.expovariate(1 / mean) if mean else 0.0 for _ in range(count)]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds from the start at which each of `count` requests is due; the first at 0, ascending.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / `rate`: 1 is a Poisson process,
    less comes in bursts, more is more even (the gaps' coefficient of variation is 1 / sqrt(burstiness)).
    The gaps are scaled so that their mean is exactly 1 / `rate`: a short run offers the load that was
    asked for. An infinite rate sends all at once. Raises ValueError unless both are positive.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError("the request rate and the burstiness must be positive")
    if count < 2 or rate == float("inf"):
        return [0.0] * count
    rng = random.Random(f"arrivals {seed}")  # a dataset draws its lengths from the bare seed
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    total = sum(gaps)
    if total == 0.0:  # very small shapes underflow: everything comes in one burst
        return [0.0] * count
    stretch = (count - 1) / rate / total
    return [0.0, *itertools.accumulate(gap * stretch for gap in gaps)]
