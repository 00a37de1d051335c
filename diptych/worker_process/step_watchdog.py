"""Durations of a worker's steps, the expected one of the running step, and by how much it is late. Pure.

Steps are kept by size class, the power of two at or below the number of tokens that they compute: a step of
forty prompt tokens says little about one of four hundred. A step is late when it takes `MARGIN` times as long
as the longest of the recent ones in its class, or as the nearest class lets expect, and never before
`LEAST_S`: a machine that is busy with something else is no sign of a fault.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

KEPT = 32  # steps of a class
RECENT_S = 5.0  # older steps say nothing about the worker's present speed
MARGIN = 4.0
LEAST_S = 0.5
FIRST_S = 30.0  # for the first step of all
ENCODE = -1  # the class of an image's tile, which says nothing about steps of tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Recent steps of one size class: how many, and the medians of their seconds and tokens."""

    size_class: int
    steps: int
    median_s: float
    tokens: int


def size_class(tokens: int) -> int:
    """Return the class c of steps of 2^c to 2^(c+1)-1 tokens."""
    return max(tokens, 1).bit_length() - 1


class StepWatchdog:
    """Record the begin and end of every step; ``now`` is seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, float, int]]] = {}  # by class: (end, seconds, tokens)
        self._running: tuple[float, int, int] | None = None  # (begin, tokens, class)
        self._failed = False  # the running step, before a part of it was begun again
        self._since = 0.0  # begin of the part that is being computed

    def begin(self, tokens: int, now: float) -> None:
        """Record the begin of a step of `tokens` tokens."""
        self._running, self._failed, self._since = (now, tokens, size_class(tokens)), False, now

    def begin_encode(self, now: float) -> None:
        """Record that the encoding of a tile begins, in place of a step."""
        self._running, self._failed, self._since = (now, 0, ENCODE), False, now

    def retry(self, now: float) -> None:
        """Record that the running step failed and a part of it begins, which is due when the whole was.

        Any thread may call it.
        """
        if self._running is not None:
            self._failed, self._since = True, now

    def end(self, now: float) -> None:
        """Record the end of the running step. The length of one that failed says nothing about others."""
        if self._running is None:
            return
        begun, tokens, kind = self._running
        self._running = None
        if self._failed:
            return
        steps = self._steps.setdefault(kind, deque(maxlen=KEPT))
        steps.append((now, now - begun, tokens))

    def late_s(self, now: float) -> float:
        """Return the seconds that the running step is past its predicted end; 0 between steps."""
        if self._running is None:
            return 0.0
        return max(now - self._since - self._predicted_s(self._running[2]), 0.0)

    def times(self, now: float) -> list[StepTime]:
        """Return the times of the last seconds' steps, for comparison with other workers."""
        found = []
        for kind, steps in sorted(self._steps.items()):
            if kind == ENCODE:
                continue
            recent = [(seconds, tokens) for ended, seconds, tokens in steps if now - ended <= RECENT_S]
            if recent:
                seconds, tokens = (statistics.median(values) for values in zip(*recent, strict=True))
                found.append(StepTime(kind, len(recent), seconds, round(tokens)))
        return found

    def _predicted_s(self, kind: int) -> float:
        alike = [known for known in self._steps if (known == ENCODE) == (kind == ENCODE)]
        if not alike:
            return FIRST_S
        nearest = min(alike, key=lambda known: abs(known - kind))
        longest = max(seconds for _, seconds, _ in self._steps[nearest])
        return max(MARGIN * longest * 2.0 ** max(kind - nearest, 0), LEAST_S)
