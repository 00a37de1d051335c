"""How much recovering may cost: so many sequences a window may be prefilled again after a fault.

Recovery repeats work. While the fleet is well that is little; when workers die one after the other, every
survivor would be busy with the prompts of the dead and serve nobody. The budget bounds it: within a window,
a fraction of the sequences that came in the same time, or `floor` if that is more. A floor as large as what
runs at once lets the loss of the whole fleet be recovered once a window.

Pure: time is an argument, in seconds on a monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

FRACTION: Final = 0.2
WINDOW_S: Final = 10.0
SLICES: Final = 20  # of a window; it moves by one of them at a time


class RetryBudget:
    """Of one gateway.

    Args:
        floor: sequences that may always be prefilled again within a window, at least 1.
        fraction: of the sequences that came within a window.
    """

    def __init__(self, floor: int, *, fraction: float = FRACTION, window_s: float = WINDOW_S) -> None:
        self._floor = floor
        self._fraction = fraction
        self._slice_s = window_s / SLICES
        self._arrived = _Window()
        self._retried = _Window()

    def arrived(self, sequences: int, now: float) -> None:
        """A request was let in."""
        self._arrived.add(sequences, self._slice(now))

    def spend(self, now: float) -> bool:
        """Whether one more sequence may be prefilled again; counts it if so."""
        number = self._slice(now)
        if self._retried.total(number) >= self._limit(number):
            return False
        self._retried.add(1, number)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until one may be prefilled again, if no other asks; 0 when it may be now."""
        number = self._slice(now)
        over = self._retried.total(number) - math.ceil(self._limit(number)) + 1
        if over <= 0:
            return 0.0
        return (self._retried.gone_by(over) + SLICES) * self._slice_s - now

    def _slice(self, now: float) -> int:
        return int(now / self._slice_s)

    def _limit(self, number: int) -> float:
        return max(self._floor, self._fraction * self._arrived.total(number))


class _Window:
    """Counts by slice, those of the last `SLICES` slices."""

    def __init__(self) -> None:
        self._slices: deque[list[int]] = deque()  # [number, count], oldest first
        self._total = 0

    def add(self, count: int, number: int) -> None:
        if self._slices and self._slices[-1][0] == number:
            self._slices[-1][1] += count
        else:
            self._slices.append([number, count])
        self._total += count

    def total(self, number: int) -> int:
        while self._slices and self._slices[0][0] <= number - SLICES:
            self._total -= self._slices.popleft()[1]
        return self._total

    def gone_by(self, count: int) -> int:
        """The slice with which the oldest ``count`` of those counted leave the window."""
        for number, here in self._slices:
            count -= here
            if count <= 0:
                return number
        raise ValueError("more than there are")
