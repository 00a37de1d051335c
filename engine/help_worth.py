"""Whether steps of one stream gain by the cores of others, found out by trying.

A decode step of one stream is bound by memory: a second core makes it faster by a fifth at most. It has
hundreds of phases that end when all cores are through, and so a core that somebody else wants for a moment,
to pass on the token before, holds up all of them: with short steps that costs more than the help is worth.
What is right depends on model, precision, context and machine, and is measured while serving. Pure.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TRIES = 8
"""Steps in a row that are measured one way, then the other."""
PERIOD = 256
"""Steps from the begin of a trial to that of the next one."""


class HelpWorth:
    """Asked before each step and told after it; a step may be asked for while the one before is computed."""

    def __init__(self) -> None:
        self._told = 0
        self._lasted: dict[bool, deque[float]] = {way: deque(maxlen=TRIES) for way in (True, False)}
        self._worth = True

    def wanted(self) -> bool:
        """Whether the next step is to be helped."""
        place = self._told % PERIOD
        return place < TRIES if place < 2 * TRIES else self._worth

    def lasted(self, helped: bool, seconds: float) -> None:
        """A step took so long, from the end of the one before if it was begun by then."""
        self._lasted[helped].append(seconds)
        self._told += 1
        if self._told % PERIOD == 2 * TRIES:
            self._worth = median(self._lasted[True]) <= median(self._lasted[False])
