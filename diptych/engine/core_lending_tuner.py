"""The part of a single stream's decode step that is computed without borrowed cores, found by trials.

A decode step of one stream is bound by memory: a second core makes it faster by a quarter or a third. It has
hundreds of phases that end when all cores are through, and so a core that another thread wants for a moment
delays all of them. There is such a thread: when a step has ended, its token passes through three processes
for the first third of the next step. A step that computes its first layers alone and the others with help may
be the fastest. The best split depends on model, precision, context and machine, and is measured while
serving. Pure.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARES = (0.0, 0.2, 0.35, 0.5, 1.0)
"""Parts of a step's layers that are computed before it takes in borrowed cores."""
TRIES = 8
"""Steps in a row that are measured with one share, before the next share is tried."""
PERIOD = 512
"""Steps from the begin of a trial to that of the next one."""


class CoreLendingTuner:
    """Choose a share for each step from the times of earlier ones.

    A share may be chosen while the step before is still computed.
    """

    def __init__(self) -> None:
        self._recorded = 0
        self._seconds: dict[float, deque[float]] = {share: deque(maxlen=TRIES) for share in SHARES}
        self._best = SHARES[0]

    def next_share(self) -> float:
        """Return which of `SHARES` the next step computes without borrowed cores."""
        trial = self._recorded % PERIOD // TRIES
        return SHARES[trial] if trial < len(SHARES) else self._best

    def record(self, share: float, seconds: float) -> None:
        """Record the length of a step, from the end of the one before if it was begun by then."""
        self._seconds[share].append(seconds)
        self._recorded += 1
        if self._recorded % PERIOD == TRIES * len(SHARES):
            self._best = min(SHARES, key=lambda share: median(self._seconds[share]))
