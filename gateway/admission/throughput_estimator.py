"""How much is done a second while there is something to do: an average that forgets. Pure.

Idle time is not measured, but makes what was measured before it old: after eight seconds of it nothing is
known any more. Those who were slow, or whose clients left before anything was done, may have their full speed
by now, and nothing but work shows it.
"""

from __future__ import annotations

import math

MEMORY_S = 3.0  # what is older counts less than a third
FIRST_S = 0.25  # prefills end in batches: a rate over less time than this means nothing


class ThroughputEstimator:
    """Units done, over the time in which some were waiting to be done."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0
        self._noted_at = 0.0
        self._busy = False

    @property
    def per_s(self) -> float | None:
        """None until enough was seen."""
        return self._units / self._seconds if self._seconds >= FIRST_S and self._units else None

    def begin(self, now: float) -> None:
        """There is something to do. Nothing changes if there was."""
        if not self._busy:
            self._fade(now - self._noted_at)
            self._busy, self._noted_at = True, now

    def done(self, units: float, now: float, *, more: bool) -> None:
        """So much was done; ``more``: there is something left to do."""
        elapsed = max(now - self._noted_at, 0.0) if self._busy else 0.0
        self._fade(elapsed)
        self._units += units
        self._seconds += elapsed
        self._busy, self._noted_at = more, now

    def skip(self, now: float) -> None:
        """Nobody was there to do anything until now: that time says nothing about who is."""
        if not self._busy:
            self._fade(now - self._noted_at)
        self._noted_at = now

    def _fade(self, elapsed: float) -> None:
        kept = math.exp(-max(elapsed, 0.0) / MEMORY_S)
        self._units *= kept
        self._seconds *= kept
