"""The share of the last seconds in which a worker computed a step. Pure: times come in from outside."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0


class BusyShare:
    """Record the steps of a worker; times are seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()  # end, seconds
        self._sum = 0.0

    def record(self, seconds: float, now: float) -> None:
        """Record a step that ended now."""
        self._steps.append((now, seconds))
        self._sum += seconds

    def share(self, now: float) -> float:
        """Return the share of the window, 0 to 1; a step counts whole once it has ended in it."""
        while self._steps and self._steps[0][0] <= now - WINDOW_S:
            self._sum -= self._steps.popleft()[1]
        if not self._steps:
            self._sum = 0.0  # what rounding left
        return min(max(self._sum / WINDOW_S, 0.0), 1.0)
