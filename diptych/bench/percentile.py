"""Percentiles by linear interpolation between the two nearest ranks (Hyndman and Fan's R-7, as in numpy)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order; nan for none. `percent` is from 0 to 100."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
