"""Turns of prompt steps and decode steps on one GPU, where both phases are computed by one process.

A chunk of a prompt and a decode step that run at the same time take from each other; one after the other
each has the whole card. Whose turn it is decides what is delayed: prompts that queue go first, since a decode
step costs hardly more for many streams than for few, but of the time while streams run they get at most a
share. The rest is owed to the streams after each prompt step.

`next_turn` decides; `CardTurns` keeps the account and lets the engine loops of the two workers wait, which
run on one event loop. Times are seconds on any monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PROMPT_SHARE = 0.65
"""Most of the time that prompts get while streams run."""

Phase = Literal["prompts", "streams"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """State of a free card."""

    prompts: bool
    """A prompt step waits."""
    streams: bool
    """A decode step waits."""
    streams_run: bool
    """There are sequences to decode, though their next step may not be laid out yet."""
    owed_s: float
    """Time that the streams are to have before prompts get another turn."""


def next_turn(state: Waiting) -> Phase | None:
    """Return which phase gets the card; None: it stays free for a step that is about to come."""
    if state.prompts and (state.owed_s <= 0 or not state.streams_run):
        return "prompts"
    return "streams" if state.streams else None


class CardTurns:
    """Turns of the two engine loops. All calls are made on one event loop."""

    def __init__(self, share: float = PROMPT_SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        """Give prompts at most `share` of the time, above 0 and below 1, while streams run."""
        if not 0 < share < 1:
            raise ValueError("the share of prompts is above 0 and below 1")
        self._rest = (1 - share) / share  # seconds of the streams for a second of a prompt
        self._clock = clock
        self._holder: Phase | None = None
        self._began = 0.0
        self._waiting: dict[Phase, asyncio.Future[None]] = {}
        self._streams_run = False
        self._owed_s = 0.0
        self._length_s = 0.0  # of a decode step

    @property
    def owed_s(self) -> float:
        """Time that the streams are to have before the next prompt step."""
        return self._owed_s

    async def begin_prompts(self) -> None:
        """Wait for the turn of a prompt step."""
        await self._begin("prompts")

    def end_prompts(self) -> None:
        """End the turn of a prompt step."""
        self._owed_s = max(self._owed_s, 0.0) + self._rest * self._end("prompts")
        self._give()

    async def begin_streams(self) -> None:
        """Wait for the turn of decode steps; sequences run from now on."""
        self._streams_run = True
        await self._begin("streams")

    def count_streams(self, seconds: float) -> None:
        """Count a decode step of this length against what the streams are owed."""
        self._length_s = seconds
        self._owed_s = max(self._owed_s - seconds, 0.0)

    def end_streams(self, *, idle: bool = False) -> None:
        """End the turn of decode steps, if it has one. `idle`: nothing is left to decode."""
        if idle:
            self._streams_run, self._owed_s = False, 0.0
        if self._holder == "streams":
            self._end("streams")
        self._give()

    @property
    def may_go_on(self) -> bool:
        """True if another decode step may be launched behind the present one, in the same turn."""
        return "prompts" not in self._waiting or self._owed_s > 2 * self._length_s

    async def _begin(self, phase: Phase) -> None:
        if self._holder == phase:
            return
        turn = self._waiting[phase] = asyncio.get_running_loop().create_future()
        self._give()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and self._holder == phase:
                self._holder = None
                self._give()
            raise
        finally:
            if self._waiting.get(phase) is turn:
                del self._waiting[phase]

    def _end(self, phase: Phase) -> float:
        """End a turn; return its seconds."""
        if self._holder != phase:
            return 0.0
        self._holder = None
        return self._clock() - self._began

    def _give(self) -> None:
        if self._holder is not None:
            return
        state = Waiting(
            "prompts" in self._waiting, "streams" in self._waiting, self._streams_run, self._owed_s
        )
        phase = next_turn(state)
        if phase is None:
            return
        turn = self._waiting.pop(phase)
        self._holder, self._began = phase, self._clock()
        if not turn.done():
            turn.set_result(None)
