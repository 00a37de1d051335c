"""Waits for the device that leave the core to others.

CUDA spins while it waits, so that each worker burned a core. An event made for blocking lets the thread sleep
until an interrupt, which comes some 50 µs after the end: nothing beside a long step. A decode step is too
short for that. Its length is known from those before, so the thread sleeps through most of it, and spins for
the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

LONG_TOKENS = 256
"""A step of as many takes milliseconds: the end of shorter ones is waited for without sleep."""
_SHARE = 0.75
"""Part of the expected time that is slept through."""
_LEAST_NAP_S = 5e-4
"""Shorter naps spare no core: falling asleep and waking take a tenth of it."""
_KNOWN, _KEPT = 4, 8
"""Steps of a kind that are waited for before one is slept through, and those whose shortest is expected."""


class Event(Protocol):
    """A recorded CUDA event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def wait_for_stream(tokens: int) -> None:
    """Wait for what is queued on the current stream, a step of so many tokens."""
    event = torch.cuda.Event(blocking=tokens >= LONG_TOKENS)
    event.record()
    event.synchronize()


class StepNap:
    """Wait for steps that come one after the other, each of a kind whose steps take about the same time."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Expect nothing yet: the first steps of a kind are waited for without sleep."""
        self._clock, self._sleep = clock, sleep
        self._taken: dict[Hashable, deque[float]] = {}
        self._last_end = 0.0

    def wait(self, kind: Hashable, launched: float, done: Event) -> None:
        """Wait for a step that was launched at `launched`, in seconds of the clock."""
        if done.query():
            self._last_end = self._clock()
            return
        # The step before, which may have been running then, was waited for.
        begin = max(launched, self._last_end)
        taken = self._taken.setdefault(kind, deque(maxlen=_KEPT))
        expected = min(taken) if len(taken) >= _KNOWN else 0.0
        nap = begin + _SHARE * expected - self._clock()
        if nap >= _LEAST_NAP_S:
            self._sleep(nap)
            if done.query():  # it was shorter, and how much is not known
                taken.clear()
        done.synchronize()
        self._last_end = self._clock()
        if taken or expected == 0.0:
            taken.append(self._last_end - begin)
