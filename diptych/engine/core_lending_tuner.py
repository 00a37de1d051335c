"""From where on steps of one stream gain by the cores of others, found out by trying.

A decode step of one stream is bound by memory: a second core makes it faster by a quarter or a third. It has
hundreds of phases that end when all cores are through, and so a core that somebody else wants for a moment
holds up all of them. Somebody does: when a step has ended, its token is passed on, through three processes,
for the first third of the next one. A step that is computed alone for so long, and with help from then on,
may be the fastest. What is right depends on model, precision, context and machine, and is measured while
serving. Pure.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARES = (0.0, 0.2, 0.35, 0.5, 1.0)
"""Of a step's layers, computed before there is help."""
TRIES = 8
"""Steps in a row that are measured one way, then the next."""
PERIOD = 512
"""Steps from the begin of a trial to that of the next one."""


class CoreLendingTuner:
    """Asked before each step and told after it; a step may be asked for while the one before is computed."""

    def __init__(self) -> None:
        self._told = 0
        self._lasted: dict[float, deque[float]] = {share: deque(maxlen=TRIES) for share in SHARES}
        self._best = SHARES[0]

    def wanted(self) -> float:
        """Which of `SHARES` the next step is to be computed without help."""
        trial = self._told % PERIOD // TRIES
        return SHARES[trial] if trial < len(SHARES) else self._best

    def lasted(self, share: float, seconds: float) -> None:
        """A step took so long, from the end of the one before if it was begun by then."""
        self._lasted[share].append(seconds)
        self._told += 1
        if self._told % PERIOD == TRIES * len(SHARES):
            self._best = min(SHARES, key=lambda one: median(self._lasted[one]))
