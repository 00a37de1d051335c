"""A figure of several rounds in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median_and_range(values: Sequence[float], digits: int) -> str:
    """Format as `12.5 (11.0–14.1)`: the median, the smallest and the largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def stolen_in_turns(shares: Sequence[float]) -> str:
    """Say below a table what share of the cores' time was stolen in each turn."""
    return f"{statistics.median(shares):.1%} of the cores' time stolen by the hypervisor (median of turns)"
