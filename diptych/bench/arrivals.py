"""When requests are sent in an open loop."""

from __future__ import annotations

import itertools
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is due; the first at 0, ascending.

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
