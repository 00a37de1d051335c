"""The prefill loop: ask, schedule, run, apply.

One event loop owns all of this; only `run_step` happens on the engine's own thread. What a step computed is
pushed by the attempts' own tasks (attempts.py) while the next one is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from diptych.engine.batch import AbortWords
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleFailure
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from diptych.worker_process.logprob_codec import failure_reason
from diptych.worker_process.step_thread import StepThread
from diptych.worker_process.step_watchdog import StepWatchdog
from prefill_worker.chunk_step import Computed, Row, run_step
from prefill_worker.request import ChunkDone, PrefillRequest, State, Stop
from prefill_worker.request_manager import RequestManager
from prefill_worker.scheduler import plan_asks, plan_chunks

LOOKAHEAD_STEPS = 2
"""Prompts ask for blocks when the granted ones fill less than this many steps: one to run, one to follow."""
BLOCKS_SHORT_S = 0.1
"""Who waits for blocks longer than this does so for want of them, and not for an answer."""


class EngineLoop:
    """Chunked prefill for several gateways into the pools of several decode workers."""

    def __init__(
        self,
        runner: Runner,
        *,
        block_size: int,
        chunk: int,
        enough: int,
        max_prompts: int,
        max_context: int,
        on_ended: Callable[[PrefillRequest, str], None],  # outcome: committed, failed or cancelled
    ) -> None:
        self._runner = runner
        self._chunk = chunk
        self._enough = enough
        self._max_prompts = max_prompts
        self._step: StepThread[PrefillRequest] = StepThread(computes=not runner.launches)
        self._wake = asyncio.Event()
        self.attempts = RequestManager(
            self._step,
            block_size=block_size,
            max_context=max_context,
            on_ended=on_ended,
            wake=self._wake.set,
        )
        self.steps = 0  # grows with every step: the heartbeat's progress

    # ---- what the shell around it asks ---------------------------------------------------------------

    def tick(self, now: float) -> None:
        """A few times a second."""
        self.attempts.end_late(now)

    def hand_back(self) -> None:
        self.attempts.hand_back()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.attempts.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.attempts.draining = draining

    @property
    def busy(self) -> bool:
        """Whether a step is being computed; prompts whose blocks are on their way make nobody busy."""
        return self._step.busy

    @property
    def clock(self) -> StepWatchdog:
        """How long its steps take."""
        return self._step.clock

    @property
    def num_running(self) -> int:
        return sum(request.state is State.GRANTED for request in self.attempts.all())

    @property
    def num_waiting(self) -> int:
        return len(self.attempts) - self.num_running

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute, cached ones not yet known to be so included."""
        return sum(request.remaining for request in self.attempts.all())

    def flush_prefix_cache(self) -> int:
        """Forget the prefixes of the own copies, where there are some. How many keys went."""
        return self.attempts.handoff.flush_prefix_cache()

    def close(self) -> None:
        self._step.close()
        self._runner.rest()

    # ---- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled; sleeps while there is nothing to do."""
        while True:
            self._wake.clear()
            self._ask()
            chunks = plan_chunks([r.plan_entry for r in self._computable()], self._chunk, self._enough)
            if not chunks:
                self._runner.rest()
                await self._wake.wait()
                continue
            rows = [(self.attempts[chunk.key], chunk) for chunk in chunks]
            batch = [request for request, _ in rows]
            tokens = sum(chunk.tokens for chunk in chunks)
            self._runner.own()
            self._tell_backlog(batch, tokens)
            self._apply(rows, await self._step.compute(batch, rows, self._run_step, tokens))

    def _computable(self) -> list[PrefillRequest]:
        return [request for request in self.attempts.all() if request.computable]

    def _tell_backlog(self, batch: Sequence[PrefillRequest], tokens: int) -> None:
        """Say for how long prompts have waited, if this step leaves some of them to the next one."""
        now = time.monotonic()
        for request in batch:
            request.begin(now)
        waiting = self._wait_for_cores(now)
        left = sum(request.remaining for request in waiting) > tokens
        self._runner.set_backlog(max(request.waited_s(now) for request in waiting) if left else None)

    def _wait_for_cores(self, now: float) -> list[PrefillRequest]:
        """All that are not through; but where blocks are what is short, those that have some. The others wait
        for decode's steps, and the cores would not help them.
        """
        short = any(
            request.state is State.ASKED and now - request.entered[State.ASKED] > BLOCKS_SHORT_S
            for request in self.attempts.all()
        )
        return self._computable() if short else [r for r in self.attempts.all() if r.stop is None]

    def _ask(self) -> None:
        """Let the prompts that are about to run ask for blocks."""
        by_state: dict[State, list[PrefillRequest]] = {state: [] for state in State}
        for request in self.attempts.all():
            by_state[request.state].append(request)
        keys = plan_asks(
            [r.plan_entry for r in by_state[State.QUEUED] if r.compiled],
            [r.plan_entry for r in by_state[State.ASKED]],
            [r.plan_entry for r in by_state[State.GRANTED]],
            lookahead=LOOKAHEAD_STEPS * self._chunk,
            max_prompts=self._max_prompts,
        )
        for key in keys:
            self.attempts.ask(self.attempts[key])

    def _run_step(self, rows: Sequence[Row], abort: AbortWords) -> list[Computed | SampleFailure]:
        return run_step(self._runner, rows, abort)

    def _apply(self, rows: Sequence[Row], outcome: Sequence[Computed | SampleFailure]) -> None:
        """Tell each request's handoff what its blocks hold now, and its gateway the prompt's scores."""
        self.steps += 1
        now = time.monotonic()
        for (request, chunk), computed in zip(rows, outcome, strict=True):
            if request.stop is not None:
                request.news.put_nowait(request.stop)
                continue
            if isinstance(computed, SampleFailure):
                failure = work_pb2.Failure(reason=failure_reason(computed), message=computed.reason)
                self.attempts.stop(request, Stop(failure))
                continue
            if computed.prompt_scores:
                position = request.computed + 1
                request.gateway.prompt_scores(request.key, position, computed.prompt_scores)
            request.computed += chunk.tokens
            request.steps += 1
            if chunk.last:
                request.computed_at = now
                self.attempts.say_first(request, computed.first_tokens)
            else:
                reach("prefill.chunk")
            request.news.put_nowait(ChunkDone(request.computed, computed.first_tokens))
