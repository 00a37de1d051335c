"""Percentiles of many positive values in little memory: counts in bins that are half a percent wide."""

from __future__ import annotations

import math
from collections import Counter

_WIDTH = math.log(1.005)


class Histogram:
    """Weighted values; percentiles are right to half a percent of the value."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.total = 0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value in seconds `weight` times; values below a nanosecond count as one."""
        self._bins[round(math.log(max(value, 1e-9)) / _WIDTH)] += weight
        self.total += weight

    def percentile(self, percent: float) -> float | None:
        """Return a percentile, from 0 to 100; None for no values."""
        wanted, passed = self.total * percent / 100, 0
        for index in sorted(self._bins):
            passed += self._bins[index]
            if passed >= wanted:
                return math.exp(index * _WIDTH)
        return None
