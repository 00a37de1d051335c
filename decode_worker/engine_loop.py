"""The decode loop: schedule, run, apply, flush.

One event loop owns all of this; what has to be waited for (pipeline.py) happens on the engine's own thread or
the backend's, while the event loop keeps reading streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from decode_worker.local_prefill import LocalPrefills, LocalPrompt
from decode_worker.local_schedule import LocalBounds
from decode_worker.pipeline import Pipeline
from decode_worker.request import State
from decode_worker.request_manager import Listeners, RequestManager
from decode_worker.scheduler import Candidate, StepPlan, plan_step
from decode_worker.speculation import Speculation
from decode_worker.step_group import RowOwner, StepGroup
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.runtime.failpoints import reach
from diptych.worker_process.draft_chunks import PromptDrafts
from diptych.worker_process.step_thread import StepThread
from diptych.worker_process.step_watchdog import StepWatchdog
from kvtransfer.drivers.server import HandoffServer

IDLE_CHECK_S = 1.0
"""Idle time after which the block pool is checked, which takes a pass over all blocks."""
NOTHING_UNKNOWN: Mapping[int, int] = {}
"""Every token of every sequence is on the host."""


class EngineLoop:
    """Continuous batching over one block pool.

    A finished sequence leaves and a ready one joins at the next step; every step gives one token for
    each sequence in the batch, or several where drafts were right (speculation.py). Chunks of prompts that
    this worker computes itself (local_prefill.py) are rows of such steps, or steps between them.
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
        speculation: Speculation | None = None,
        draft_chunks: PromptDrafts | None = None,
    ) -> None:
        self._cpu = runner.cpu
        self._mixes_chunks = runner.mixes_chunks
        self._memory = memory
        self._pool = pool
        self._max_batch = max_batch
        self._step: StepThread[RowOwner] = StepThread(runner.cpu)
        self._wake = asyncio.Event()
        pool.on_released = self._wake.set  # groups that sat out a step for want of blocks are planned again
        self.requests = RequestManager(
            memory, pool, self._step, max_context=max_context, listeners=listeners, wake=self._wake.set
        )
        self._pipeline = Pipeline(
            runner,
            memory,
            self._step,
            plan_ahead=self._plan_ahead,
            apply=self._apply,
            release_blocks=self.requests.release_blocks,
            speculation=speculation,
            draft_chunks=draft_chunks,
        )
        self.steps = 0  # grows with every step: the heartbeat's progress
        self._idle_since = 0.0
        self._step_began = 0.0
        self._checked_steps = 0

    def connect(self, handoff: HandoffServer, bounds: LocalBounds) -> None:
        """Take blocks from `handoff`, also for prompts within `bounds` that this worker computes itself."""
        self.requests.grants = handoff
        self.local = self.requests.local = LocalPrefills(
            self._memory,
            handoff.local,
            bounds,
            writes=self._step.writes,
            abort=self._step.abort,
            wake=self._wake.set,
        )

    # ---- its server ----------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """True if nothing new is taken."""
        return self.requests.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.requests.draining = draining

    @property
    def busy(self) -> bool:
        """True while a step is being computed; sequences that wait for blocks do not count."""
        return self._step.busy

    @property
    def watchdog(self) -> StepWatchdog:
        """Durations of its steps."""
        return self._step.watchdog

    @property
    def num_running(self) -> int:
        return self.requests.num_running

    @property
    def num_waiting(self) -> int:
        return self.requests.num_waiting

    def tick(self, now: float) -> None:
        """End requests past their deadline, and check the block pool when idle. Called a few times a second.

        Raises BlockMisuse where the pool is inconsistent, which ends the process: wrong text would be worse
        than a restart.
        """
        if len(self.requests):
            self._idle_since = now
            self._wake.set()  # not every way in which blocks become free wakes the loop
        elif self._checked_steps != self.steps and now - self._idle_since > IDLE_CHECK_S:
            self._pool.invariants()
            self._checked_steps = self.steps
        self.requests.expire(now)

    def hand_back(self) -> None:
        """See `RequestManager.hand_back`."""
        self.requests.hand_back()

    def close(self) -> None:
        """Wait for running and launched steps, and yield the cores."""
        self._step.close()
        self._pipeline.close()
        self._cpu.yield_()

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; held blocks stay held. Return how many keys were forgotten."""
        forgotten = self._pool.clear_cache()
        self.requests.prefixes.report_changes()
        self.requests.grants.blocks_freed()
        return forgotten

    # ---- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled; sleeps while there is nothing to do."""
        while True:
            if pause := self._cpu.pause_s(time.monotonic()):
                await asyncio.sleep(pause)
            self._wake.clear()
            if self._cpu.turns is not None:
                await self._cpu.turns.begin_streams()
            batch = self._schedule()
            prompts = self.local.plan(sum(len(group.rows) for group in batch), self._cpu.slack_s())
            if not batch and not prompts:
                self._cpu.yield_()
                self._cpu.end_decode_turn(idle=True)
                await self._wake.wait()
                continue
            if prompts and not self._mixes_chunks:
                await self._run_step((), prompts)
                batch, prompts = self._schedule(), []  # no two of these steps follow each other
            if batch or prompts:
                await self._run_step(batch, prompts)
            self._cpu.end_decode_turn()

    async def _run_step(self, batch: Sequence[StepGroup], prompts: Sequence[LocalPrompt]) -> None:
        self._step_began = time.monotonic()
        self._cpu.begin_decode(self._step_began)
        await self._pipeline.run(batch, prompts)

    def _schedule(self) -> list[StepGroup]:
        """Return the batch of the next step, with its blocks."""
        while True:
            plan = self._plan([group.candidate() for group in self.requests.running.values()])
            self._carry_out(plan)
            if plan.run or not plan.preempt:
                return [self.requests.running[arrival_order] for arrival_order in plan.run]

    def _plan_ahead(self, present: Sequence[StepGroup]) -> list[StepGroup]:
        """Return the batch after `present` with its blocks; empty if it needs a decision first."""
        if not self._cpu.may_launch_ahead() or self.local.computable:
            return []
        unknown = {group.arrival_order: 1 for group in present if not group.ended}
        candidates = [
            group.candidate(unknown.get(group.arrival_order, 0))
            for group in self.requests.running.values()
            if group.continues(unknown.get(group.arrival_order, 0))
        ]
        plan = self._plan(candidates)
        if plan.preempt or plan.abort_newest_grant or any(one.shared for one in candidates):
            return []
        self._carry_out(plan, unknown)
        return [self.requests.running[arrival_order] for arrival_order in plan.run]

    def _plan(self, candidates: Sequence[Candidate]) -> StepPlan:
        return plan_step(
            candidates,
            free_blocks=self._pool.available(),
            max_batch=self._max_batch,
            grants=self.requests.grants.num_grants,
            quarantined=self._pool.quarantined(),
        )

    def _carry_out(self, plan: StepPlan, unknown: Mapping[int, int] = NOTHING_UNKNOWN) -> None:
        """Carry out a plan; `unknown` tokens of a group are still being computed."""
        running = self.requests.running
        for arrival_order in plan.preempt:
            self.requests.preempt_or_fail(running[arrival_order])
        if plan.abort_newest_grant and (aborted := self.requests.grants.abort_newest_grant()):
            self.requests.preempt_request(aborted)
        for arrival_order in plan.grow:
            running[arrival_order].ensure_blocks(unknown.get(arrival_order, 0))
        for arrival_order in plan.run:
            request = running[arrival_order].request
            if request.state is State.READY:
                request.move(State.RUNNING)

    def _apply(self, owners: Sequence[RowOwner], picked: Sequence[Any]) -> None:
        """Apply a step's results, release step groups that ended meanwhile, send one message per gateway."""
        self.steps += 1
        self._record_step(owners, time.monotonic())
        reach("decode.step")
        begin = 0
        for owner in owners:
            end = begin + len(owner.rows)
            if isinstance(owner, LocalPrompt):
                self.local.take(owner, picked[begin])
            elif isinstance(owner, StepGroup):
                self._apply_to_group(owner, picked[begin:end])
            begin = end
        for gateway in dict.fromkeys(owner.request.gateway for owner in owners):
            gateway.flush()
        self.requests.prefixes.report_changes()

    def _record_step(self, owners: Sequence[RowOwner], now: float) -> None:
        """Record the length of a step, and what chunks of prompts added to it."""
        chunks = [owner.tokens for owner in owners if isinstance(owner, LocalPrompt)]
        alone = len(chunks) == len(owners)
        self.local.budget.record(now - self._step_began, sum(chunks), alone=alone)
        self._step_began = now
        self._cpu.end_decode(now, with_prompts=bool(chunks))

    def _apply_to_group(self, group: StepGroup, picked: Sequence[Any]) -> None:
        if not group.ended:
            self.requests.advance(group, partial(group.take, picked))
        elif not self._step.writes(group):  # else released after the step that was launched ahead
            self.requests.release_blocks(group)
