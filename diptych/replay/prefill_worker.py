"""A prefill worker on virtual time: the real schedule of asks and chunks, steps that only take time.

A prompt is queued, asks its decode worker for blocks, is granted them, and is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from diptych.replay.events import Events
from diptych.replay.shared_cores import PacedWork, SharedCores
from diptych.replay.step_times import StepTimes
from diptych.replay.stream import Stream
from prefill_worker.engine_loop import LOOKAHEAD_STEPS
from prefill_worker.scheduler import Prompt, plan_asks, plan_chunks

MAX_PROMPTS = 32
"""Prompts that compute or ask at a time, the worker's default."""
OnPrefilled = Callable[[Stream], None]


class Granter(Protocol):
    """The decode workers: `ask` calls `SimulatedPrefillWorker.granted` now or later."""

    def ask(self, stream: Stream) -> None: ...


class SimulatedPrefillWorker:
    """Prefill worker on virtual time.

    Args:
        chunk: tokens of a step at most.
        enough: tokens from which on a step takes no further prompt.
        cores: what it shares with a decode worker.
    """

    def __init__(
        self,
        events: Events,
        times: StepTimes,
        granter: Granter,
        on_prefilled: OnPrefilled,
        chunk: int,
        enough: int,
        cores: SharedCores | None = None,
    ) -> None:
        self._events, self._times = events, times
        self._granter, self._on_prefilled = granter, on_prefilled
        self._chunk, self._enough, self._cores = chunk, enough, cores
        self._work: PacedWork | None = None
        if cores is not None:
            cores.on_decoding = self._change_pace
        self._queued: dict[int, Stream] = {}
        self._asked: dict[int, Stream] = {}
        self._granted: dict[int, Stream] = {}
        self._arrived = 0
        self._began = 0.0
        self.outstanding = 0
        """Tokens of its prompts, cached ones included: what a gateway knows of it."""
        self.busy_s = 0.0

    def dispatch(self, stream: Stream, predicted: int) -> None:
        """Queue a prompt, of which `predicted` tokens are to be computed."""
        self._arrived += 1
        self.outstanding += stream.tokens
        stream.prompt = Prompt(
            (str(stream.number), self._arrived), predicted, str(stream.decode), 0, self._arrived
        )
        self._queued[stream.number] = stream
        self._ask()
        self._begin_step()

    def granted(self, stream: Stream) -> None:
        """Begin a prompt that has its blocks now, with `stream.left` tokens to compute."""
        del self._asked[stream.number]
        self._granted[stream.number] = stream
        stream.prompt = replace(_prompt(stream), tokens=stream.left)
        if self._work is None:
            # Not at once: this may be an answer to an ask that is being made.
            self._events.at(self._events.now, self._begin_step)

    def _ask(self) -> None:
        if not self._queued:
            return
        keys = plan_asks(
            [_prompt(one) for one in self._queued.values()],
            [_prompt(one) for one in self._asked.values()],
            [_prompt(one) for one in self._granted.values()],
            lookahead=LOOKAHEAD_STEPS * self._chunk,
            max_prompts=MAX_PROMPTS,
        )
        for name, _ in keys:
            stream = self._queued.pop(int(name))
            self._asked[stream.number] = stream
            self._granter.ask(stream)

    def _begin_step(self) -> None:
        if self._work is not None or not self._granted:
            return
        chunks = plan_chunks([_prompt(one) for one in self._granted.values()], self._chunk, self._enough)
        rows = [(self._granted[int(chunk.key[0])], chunk) for chunk in chunks]
        seconds = self._times.prefill_s([(c.tokens, stream.tokens - stream.left) for stream, c in rows])
        for stream, _ in rows:
            if not stream.pulled:
                stream.pulled = True
                seconds += stream.start * self._times.pull_s
        computed = [(stream, c.tokens) for stream, c in rows]
        self._began = self._events.now
        slowness = 1.0 if self._cores is None else self._cores.prompt_slowness
        self._work = PacedWork(self._events, seconds, slowness, lambda: self._end_step(computed))
        if self._cores is not None:
            self._cores.set_prefilling(True, self._backlog_s(computed))

    def _change_pace(self) -> None:
        if self._work is not None and self._cores is not None:
            self._work.set_slowness(self._cores.prompt_slowness)

    def _backlog_s(self, computed: list[tuple[Stream, int]]) -> float | None:
        """Return for how long the oldest prompt waited, if the present step leaves some to the next one."""
        for stream, _ in computed:
            if stream.begun_s is None:
                stream.begun_s = self._events.now
        here = [*self._queued.values(), *self._asked.values(), *self._granted.values()]
        if sum(_prompt(one).tokens for one in here) <= sum(tokens for _, tokens in computed):
            return None
        now = self._events.now
        return max((now if one.begun_s is None else one.begun_s) - one.arrival_s for one in here)

    def _end_step(self, computed: list[tuple[Stream, int]]) -> None:
        self._work = None
        self.busy_s += self._events.now - self._began
        for stream, tokens in computed:
            stream.left -= tokens
            stream.prompt = replace(_prompt(stream), tokens=stream.left)
            if not stream.left:
                del self._granted[stream.number]
                self.outstanding -= stream.tokens
                self._on_prefilled(stream)
        self._ask()
        self._begin_step()
        if self._work is None and self._cores is not None:
            self._cores.set_prefilling(False)


def _prompt(stream: Stream) -> Prompt:
    if stream.prompt is None:
        raise ValueError(f"request {stream.number} was not dispatched")
    return stream.prompt
