"""Virtual time: what is to happen next, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """Queue of callbacks in order of virtual time, equal times in order of their planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Plan a callback for `time`, in seconds; not before now."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time, self.now), self._planned, do))

    def run_until(self, time: float) -> None:
        """Run all that is planned until `time`, and be there."""
        while self._heap and self._heap[0][0] <= time:
            self.step()
        self.now = max(self.now, time)

    def step(self) -> bool:
        """Run the next callback; False if there is none."""
        if not self._heap:
            return False
        self.now, _, do = heapq.heappop(self._heap)
        do()
        return True
