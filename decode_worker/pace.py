"""How often decode steps begin while prompts wait for cores. Pure.

A step computes one token of every stream, and costs hardly more for many streams than for few: on cores that
prefill could use as well, steps that follow each other at once serve a few streams fast while prompts queue.
Begun less often, they serve the same streams at a slower pace, more of them at a time, and the prompts get
what is left of the cores: first tokens come sooner, and there are more tokens a second in all.
"""

from __future__ import annotations


class Pace:
    """Told when steps begin and end; `now` is seconds on any monotonic clock."""

    def __init__(self, stretch: float) -> None:
        """`stretch`: from the begin of a step to that of the next one, in lengths of the step, while others
        wait. 1: at once.
        """
        self._stretch = stretch
        self._began = self._due = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began = now

    def end(self, now: float) -> None:
        """It is over."""
        self._due = self._began + self._stretch * (now - self._began)

    def pause_s(self, now: float) -> float:
        """How long the cores may be left to those who wait for them."""
        return max(self._due - now, 0.0)
