"""Cores that a prefill and a decode worker of one machine share, on virtual time.

What either computes takes longer while the other computes, too. While prompts wait for cores, decode steps
begin less often, as the real pacing says (diptych/engine/step_pacing.py).
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.step_pacing import StepPacing
from diptych.replay.events import Events

PACING = 1.3, 3.0
"""Least and most lengths of a step from one begin to the next, the workers' defaults."""


class SharedCores:
    """State of one machine's two workers.

    Args:
        prompts_beside: factor on the time of prompts while a decode step is computed.
        steps_beside: factor on the time of decode steps while a prompt is computed.
    """

    def __init__(self, prompts_beside: float, steps_beside: float) -> None:
        self._prompts_beside, self._steps_beside = prompts_beside, steps_beside
        self._pacing = StepPacing(*PACING)
        self._decoding = self._prefilling = False
        self._waited_s: float | None = None
        self.on_decoding: Callable[[], None] = lambda: None
        """Called when decode steps begin or end."""
        self.on_prefilling: Callable[[], None] = lambda: None
        """Called when a step of prompts begins or ends."""

    @property
    def prompt_slowness(self) -> float:
        """Return the factor on the time of prompts now."""
        return self._prompts_beside if self._decoding else 1.0

    @property
    def step_slowness(self) -> float:
        """Return the factor on the time of decode steps now."""
        return self._steps_beside if self._prefilling else 1.0

    @property
    def backlog(self) -> bool:
        """Return whether prompts wait that the present step does not take."""
        return self._waited_s is not None

    def pause_s(self, step_s: float) -> float:
        """Return the seconds between a decode step that took `step_s` and the next one."""
        if self._waited_s is None:
            return 0.0
        return (self._pacing.stretch(self._waited_s) - 1.0) * step_s

    def set_prefilling(self, prefilling: bool, waited_s: float | None = None) -> None:
        """Record whether prompts are computed, and for how long the oldest has waited if some wait beside."""
        self._prefilling, self._waited_s = prefilling, waited_s
        self.on_prefilling()

    def set_decoding(self, decoding: bool) -> None:
        """Record whether a decode step is computed."""
        if decoding != self._decoding:
            self._decoding = decoding
            self.on_decoding()


class PacedWork:
    """Work that ends later, or sooner, where its pace changes before."""

    def __init__(self, events: Events, seconds: float, slowness: float, then: Callable[[], None]) -> None:
        """Begin work that takes `seconds` times `slowness`; `then` is called at its end."""
        self._events, self._then = events, then
        self._left_s, self._slowness, self._since = seconds, slowness, events.now
        self._plan_number = 0
        self._plan()

    def set_slowness(self, slowness: float) -> None:
        """Change the pace of what is left."""
        if slowness != self._slowness:
            self._left_s -= (self._events.now - self._since) / self._slowness
            self._since, self._slowness = self._events.now, slowness
            self._plan()

    def _plan(self) -> None:
        self._plan_number += 1
        number = self._plan_number
        self._events.at(self._since + self._left_s * self._slowness, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number == self._plan_number:
            self._plan_number += 1
            self._then()
