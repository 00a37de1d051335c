"""How often decode steps begin while prompts wait for cores. Pure.

A step computes one token of every stream, and costs hardly more for many streams than for few: on cores that
prefill could use as well, steps that follow each other at once serve a few streams fast while prompts queue.
Begun less often, they serve the same streams at a slower pace, more of them at a time, and the prompts get
what is left of the cores: first tokens come sooner, and there are more tokens a second in all.

How much less often goes by how long the oldest prompt has waited (as controlled delay does for packets,
Nichols and Jacobson 2012: how long, not how many). A short queue leaves the streams nearly what they have
alone; where it does not pass, they share what there is.
"""

from __future__ import annotations

PATIENCE_S = 0.5
"""So long prompts wait for the streams' sake."""
LOST_S = 1.0
"""From here on the streams have their slowest pace."""


class StepPacing:
    """Told when steps begin and end; `now` is seconds on any monotonic clock."""

    def __init__(self, stretch: float, most: float = 1.0) -> None:
        """`stretch`: from the begin of a step to that of the next one, in lengths of the step, while others
        wait. 1: at once. It grows to `most` as they wait longer, where that is more.
        """
        self._least = stretch
        self._more = max(most - stretch, 0.0)
        self._began = self._ended = self._length = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began = now

    def end(self, now: float) -> None:
        """It is over."""
        self._ended, self._length = now, now - self._began

    def pause_s(self, now: float, waited_s: float) -> float:
        """How long the cores may be left to those who have waited for them for `waited_s`."""
        due = self._ended + (self.stretch(waited_s) - 1.0) * self._length
        return max(due - now, 0.0)

    def stretch(self, waited_s: float) -> float:
        """Lengths of a step from one begin to the next."""
        share = (waited_s - PATIENCE_S) / (LOST_S - PATIENCE_S)
        return self._least + self._more * min(max(share, 0.0), 1.0)
