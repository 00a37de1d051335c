"""The pace of decode steps while prompts wait for cores. Pure.

A step computes one token of every stream, and costs hardly more for many streams than for few: on cores that
prefill could use as well, steps that follow each other at once serve a few streams fast while prompts queue.
Begun less often, they serve the same streams at a slower pace, more of them at a time, and the prompts get
the rest of the cores: first tokens come sooner, and there are more tokens a second in all.

How much less often depends on how long the oldest prompt has waited (as controlled delay does for packets,
Nichols and Jacobson 2012: how long, not how many). A short queue leaves the streams nearly what they have
alone; where it does not pass, prompts and streams share the cores.
"""

from __future__ import annotations

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
        self._began = self._ended = self._length = 0.0

    def begin(self, now: float) -> None:
        """Record the begin of a step."""
        self._began = now

    def end(self, now: float) -> None:
        """Record the end of the step that began last."""
        self._ended, self._length = now, now - self._began

    def pause_s(self, now: float, waited_s: float) -> float:
        """Return the seconds until the next step is due, given that the oldest prompt waited `waited_s`."""
        due = self._ended + (self.stretch(waited_s) - 1.0) * self._length
        return max(due - now, 0.0)

    def stretch(self, waited_s: float) -> float:
        """Return the lengths of a step from one begin to the next."""
        share = (waited_s - PATIENCE_S) / (LOST_S - PATIENCE_S)
        return self._least + self._more * min(max(share, 0.0), 1.0)
