"""Choices about the next decode step on a CPU: when it begins, and from which layer it borrows cores. Pure.

**Pace while prompts wait for cores.** A step computes one token of every stream, and costs hardly more for
many streams than for few: on cores that prefill could use as well, steps that follow each other at once
serve a few streams fast while prompts queue. Begun less often, they serve the same streams at a slower
pace, more of them at a time, and the prompts get the rest of the cores: first tokens come sooner, and there
are more tokens a second in all.

How much less often depends on how long the oldest prompt has waited (as controlled delay does for packets,
Nichols and Jacobson 2012: how long, not how many). A short queue leaves the streams nearly what they have
alone; where it does not pass, prompts and streams share the cores.

**Core lending.** A decode step of one stream is bound by memory: a second core makes it faster by a quarter
or a third. It has hundreds of phases that end when all cores are through, and so a core that another thread
wants for a moment delays all of them. There is such a thread: when a step has ended, its token passes
through three processes for the first third of the next step. A step that computes its first layers alone
and the others with help may be the fastest. The best split depends on model, precision, context and
machine, and is measured while serving.
"""

from __future__ import annotations

from collections import deque
from statistics import median

PATIENCE_S = 0.5
"""A prompt waits this long before the streams slow down further."""
LOST_S = 1.0
"""Wait from which on the streams have their slowest pace."""


class StepPacing:
    """Record when steps begin and end; `now` is seconds on any monotonic clock."""

    def __init__(self, stretch: float, most: float = 1.0) -> None:
        """Set the time from the begin of a step to that of the next one, in lengths of the step.

        It is `stretch` (1: no pause) while prompts wait, and grows to `most`, where that is more, as they
        wait longer.
        """
        self._least = stretch
        self._more = max(most - stretch, 0.0)
        self._began = self._last_began = self._length = 0.0

    def begin(self, now: float) -> None:
        """Record the begin of a step."""
        self._began = now

    def end(self, now: float, *, with_prompts: bool = False) -> float:
        """Record the end of the step that began last; return its seconds.

        One `with_prompts` of this worker counts as long as the step before: its chunks are a prompt's share
        of the cores, and take the place of a part of the pause.
        """
        self._last_began = self._began
        seconds = now - self._began
        if not with_prompts:
            self._length = seconds
        return seconds

    def pause_s(self, now: float, waited_s: float) -> float:
        """Return the seconds until the next step is due, given that the oldest prompt waited `waited_s`."""
        due = self._last_began + self.stretch(waited_s) * self._length
        return max(due - now, 0.0)

    def slack_s(self, waited_s: float) -> float:
        """Return the seconds of the pause after a step."""
        return (self.stretch(waited_s) - 1.0) * self._length

    def stretch(self, waited_s: float) -> float:
        """Return the lengths of a step from one begin to the next."""
        share = (waited_s - PATIENCE_S) / (LOST_S - PATIENCE_S)
        return self._least + self._more * min(max(share, 0.0), 1.0)


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
