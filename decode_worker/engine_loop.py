"""The decode loop: schedule, run, apply, flush.

One event loop owns all of this; what has to be waited for (pipeline.py) happens on the engine's own thread or
the backend's, while the event loop goes on reading streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from decode_worker.pipeline import Pipeline
from decode_worker.request import State
from decode_worker.request_manager import Listeners, RequestManager
from decode_worker.scheduler import Candidate, StepPlan, plan_step
from decode_worker.speculation import Speculation
from decode_worker.step_group import StepGroup
from decode_worker.step_pacing import StepPacing
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.runtime.failpoints import reach
from diptych.worker_process.step_thread import StepThread
from diptych.worker_process.step_watchdog import StepWatchdog

IDLE_CHECK_S = 1.0
"""Idle for so long, the block pool is checked: it costs a pass over all blocks."""
NOTHING_UNKNOWN: Mapping[int, int] = {}
"""Every token of every sequence is on the host."""


class EngineLoop:
    """Continuous batching over one block pool.

    A finished sequence leaves and a ready one joins at the next step; every step gives one token for
    each sequence in the batch, or several where drafts were right (speculation.py).
    """

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        pool: BlockPool,
        *,
        max_batch: int,
        max_context: int,
        listeners: Listeners,
        pace: StepPacing | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._pool = pool
        self._max_batch = max_batch
        self._pace = pace if pace is not None else StepPacing(1.0)
        self._step: StepThread[StepGroup] = StepThread(computes=not runner.launches)
        self._wake = asyncio.Event()
        pool.on_released = self._wake.set  # who sat out a step for want of blocks looks again
        self.attempts = RequestManager(
            memory, pool, self._step, max_context=max_context, listeners=listeners, wake=self._wake.set
        )
        self._pipeline = Pipeline(
            runner,
            memory,
            self._step,
            plan_ahead=self._plan_ahead,
            apply=self._apply,
            let_go=self.attempts.let_go,
            speculation=speculation,
        )
        self.steps = 0  # grows with every step: the heartbeat's progress
        self._idle_since = 0.0
        self._checked_steps = 0

    # ---- what the shell around it asks ---------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.attempts.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.attempts.draining = draining

    @property
    def busy(self) -> bool:
        """Whether a step is being computed; sequences that wait for blocks make nobody busy."""
        return self._step.busy

    @property
    def clock(self) -> StepWatchdog:
        """How long its steps take."""
        return self._step.clock

    @property
    def num_running(self) -> int:
        return self.attempts.num_running

    @property
    def num_waiting(self) -> int:
        return self.attempts.num_waiting

    def tick(self, now: float) -> None:
        """A few times a second: end what is past its deadline, check the books when nothing runs.

        Books that do not balance raise, and end the process: wrong text would be worse than a restart.
        """
        if len(self.attempts):
            self._idle_since = now
            self._wake.set()  # blocks come back in many ways, and not all of them are told
        elif self._checked_steps != self.steps and now - self._idle_since > IDLE_CHECK_S:
            self._pool.invariants()
            self._checked_steps = self.steps
        self.attempts.end_late(now)

    def hand_back(self) -> None:
        self.attempts.hand_back()

    def close(self) -> None:
        self._step.close()
        self._pipeline.close()
        self._runner.rest()

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; held blocks stay with who holds them. How many keys went."""
        forgotten = self._pool.clear_cache()
        self.attempts.prefixes.tell()
        self.attempts.grants.blocks_freed()
        return forgotten

    # ---- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled; sleeps while there is nothing to do."""
        while True:
            await self._make_way()
            self._wake.clear()
            batch = self._schedule()
            if not batch:
                self._runner.rest()
                await self._wake.wait()
                continue
            self._pace.begin(time.monotonic())
            self._runner.own()
            await self._pipeline.run(batch)

    async def _make_way(self) -> None:
        """Leave the cores to prompts that wait for them, as long as the streams can do without a step."""
        waited_s = self._runner.others_waited_s()
        if waited_s is None:
            return
        pause = self._pace.pause_s(time.monotonic(), waited_s)
        if pause:
            self._runner.rest()
            await asyncio.sleep(pause)

    def _schedule(self) -> list[StepGroup]:
        """Pick the batch of the next step and give it its blocks."""
        while True:
            plan = self._plan([gang.candidate() for gang in self.attempts.running.values()])
            self._carry_out(plan)
            if plan.run or not plan.preempt:
                return [self.attempts.running[joined] for joined in plan.run]

    def _plan_ahead(self, present: Sequence[StepGroup]) -> list[StepGroup]:
        """The batch after `present`, which is being computed, if it needs no decision; with its blocks."""
        if self._runner.others_waited_s() is not None or not self._runner.spare_core():
            return []  # the cores are wanted between this step and the next one
        unknown = {gang.joined: 1 for gang in present if not gang.ended}
        candidates = [
            gang.candidate(unknown.get(gang.joined, 0))
            for gang in self.attempts.running.values()
            if gang.goes_on(unknown.get(gang.joined, 0))
        ]
        plan = self._plan(candidates)
        if plan.preempt or plan.abort_newest_grant or any(one.shared for one in candidates):
            return []
        self._carry_out(plan, unknown)
        return [self.attempts.running[joined] for joined in plan.run]

    def _plan(self, candidates: Sequence[Candidate]) -> StepPlan:
        return plan_step(
            candidates,
            free_blocks=self._pool.available(),
            max_batch=self._max_batch,
            grants=self.attempts.grants.num_grants,
            quarantined=self._pool.quarantined(),
        )

    def _carry_out(self, plan: StepPlan, unknown: Mapping[int, int] = NOTHING_UNKNOWN) -> None:
        """Do what was planned; `unknown` tokens of a gang are still being computed."""
        running = self.attempts.running
        for joined in plan.preempt:
            self.attempts.make_way(running[joined])
        if plan.abort_newest_grant and (aborted := self.attempts.grants.abort_newest_grant()):
            self.attempts.preempt_attempt(aborted)
        for joined in plan.grow:
            running[joined].make_room(unknown.get(joined, 0))
        for joined in plan.run:
            request = running[joined].request
            if request.state is State.READY:
                request.move(State.RUNNING)

    def _apply(self, batch: Sequence[StepGroup], picked: Sequence[Any]) -> None:
        """Take the step's results, let go of what ended meanwhile, send one message per gateway."""
        self.steps += 1
        now = time.monotonic()
        self._pace.end(now)
        self._pace.begin(now)  # of the step that was launched ahead, if one was
        reach("decode.step")
        begin = 0
        for gang in batch:
            end = begin + len(gang.rows)
            if gang.ended:
                if not self._step.writes(gang):  # else after the step that was launched ahead
                    self.attempts.let_go(gang)
            else:
                self.attempts.carry_on(gang, partial(gang.take, picked[begin:end]))
            begin = end
        for gateway in dict.fromkeys(gang.request.gateway for gang in batch):
            gateway.flush()
        self.attempts.prefixes.tell()
