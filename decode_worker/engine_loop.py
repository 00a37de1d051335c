"""The decode loop: schedule, run, apply, flush; and the life of the requests in it.

One event loop owns all of this; only `_run_step` happens on the engine's own thread, while the event
loop goes on reading streams. Blocks of a request that ends during a step are released after that step,
since it is still writing them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.gateway_stream import GatewayStream
from decode_worker.prefixes import Prefixes
from decode_worker.request import DecodeRequest, State
from decode_worker.scheduler import Candidate, StepPlan, plan_step
from diptych.worker.v1 import work_pb2
from engine.batch import AbortWords, SequenceStep
from engine.block_pool import BlockPool
from engine.kv_memory import KVMemory
from engine.runner import Runner
from engine.sampling import Sampled, SampleFailure, sample
from kvtransfer.messages import Expected, Key
from kvtransfer.ready import HandoffStats, Ready
from runtime.block_hash import block_keys
from worker.attempt import Attempt
from worker.step import StepThread

log = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""Idle for so long, the block pool is checked: it costs a pass over all blocks."""


class Grants(Protocol):
    """The side of the hand-over that the loop talks to (kvtransfer.server.HandoffServer)."""

    def expect(self, expected: Expected) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def blocks_freed(self) -> None: ...
    def abort_newest_grant(self) -> Key | None: ...
    def stats(self) -> HandoffStats: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of what the loop does; called on the event loop."""

    ended: Callable[[DecodeRequest, str], None]  # outcome: finished, preempted, failed or cancelled
    cache_changed: Callable[[list[bytes], list[bytes]], None]  # keys added, keys removed


class EngineLoop:
    """Continuous batching over one block pool.

    A finished sequence leaves and a ready one joins at the next step; every step computes one token for
    each sequence in the batch.
    """

    grants: Grants

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        pool: BlockPool,
        *,
        max_batch: int,
        max_context: int,
        listeners: Listeners,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._pool = pool
        self._block_size = memory.layout.block_size
        self._max_batch = max_batch
        self._max_context = max_context
        self._listeners = listeners
        self._step: StepThread[DecodeRequest] = StepThread()
        self._prefixes = Prefixes(pool, self._block_size, listeners.cache_changed)
        self._wake = asyncio.Event()
        self._requests: dict[Key, DecodeRequest] = {}
        self._joined = 0
        self.steps = 0  # grows with every step: the heartbeat's progress
        self.draining = False
        self._idle_since = 0.0
        self._checked_steps = 0

    # ---- what others tell the loop -------------------------------------------------------------------

    def attach(self, work: work_pb2.Work, gateway: GatewayStream) -> None:
        """Announce an attempt: its KV may be granted and handed over from now on."""
        attempt = Attempt.from_work(work, max_context=self._max_context)
        if attempt.key in self._requests:
            log.warning("attempt %s attached twice; the second is ignored", attempt.key)
            return
        if self.draining:
            gateway.failed(attempt.key, work_pb2.FAILURE_REASON_DRAINING, "", work_pb2.PhaseTimes())
            gateway.flush()
            return
        self._joined += 1
        request = DecodeRequest(attempt, gateway, self._joined, list(attempt.delivered_ids))
        self._requests[attempt.key] = request
        gateway.keys.add(attempt.key)
        tokens = attempt.token_ids
        keys = block_keys(attempt.cache_namespace, tokens, self._block_size) if attempt.cache_read else []
        worst_case = len(attempt.prompt_ids) + attempt.max_tokens if attempt.reserve_worst_case else None
        self.grants.expect(Expected(attempt.key, len(tokens), keys, worst_case))

    def cancel(self, key: Key) -> None:
        """The gateway no longer wants it: nothing more is said about it."""
        if request := self._requests.get(key):
            self._end(request, "cancelled")

    def gateway_lost(self, gateway: GatewayStream) -> None:
        """Its stream ended: every attempt that came over it is cancelled."""
        for key in list(gateway.keys):
            self.cancel(key)
        gateway.close()

    def on_ready(self, ready: Ready) -> None:
        """The hand-over is verified: the blocks are ours, the first token goes out before any step."""
        request = self._requests.get(ready.key)
        if request is None:
            self._pool.release(ready.block_ids)
            self.grants.blocks_freed()
            return
        request.move(State.READY)
        request.block_ids = list(ready.block_ids)
        request.times.CopyFrom(ready.times)
        self._accept(request, ready.first_tokens[0].token_id, first=True)
        request.gateway.flush()
        self._wake.set()

    def on_failed(self, key: Key, reason: int, message: str) -> None:
        """The hand-over of an attempt failed; its blocks are already back or in quarantine."""
        if request := self._requests.get(key):
            self._fail(request, reason, message)
            request.gateway.flush()

    def tick(self, now: float) -> None:
        """A few times a second: end what is past its deadline, check the books when nothing runs.

        The gateway ends late requests too; this holds when it is slow or gone. Books that do not balance
        raise, and end the process: wrong text would be worse than a restart.
        """
        if self._requests:
            self._idle_since = now
            # Blocks come back from quarantine without a word to us: who sat out for want of them looks again.
            self._wake.set()
        elif self._checked_steps != self.steps and now - self._idle_since > IDLE_CHECK_S:
            self._pool.invariants()
            self._checked_steps = self.steps
        for request in list(self._requests.values()):
            if (deadline := request.attempt.deadline) is not None and now >= deadline:
                self._fail(request, work_pb2.FAILURE_REASON_DEADLINE, request.state.value)
                request.gateway.flush()

    def hand_back(self) -> None:
        """This worker leaves: the gateways continue what is here elsewhere, at the next token."""
        for request in list(self._requests.values()):
            self._fail(request, work_pb2.FAILURE_REASON_DRAINING, request.state.value)
            request.gateway.flush()

    @property
    def busy(self) -> bool:
        """Whether a step is being computed; sequences that wait for blocks make nobody busy."""
        return self._step.busy

    @property
    def num_running(self) -> int:
        """Sequences that hold verified blocks and will need more of them."""
        return sum(request.state in (State.READY, State.RUNNING) for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    # ---- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled; sleeps while there is nothing to do."""
        while True:
            self._wake.clear()
            batch = self._schedule()
            if not batch:
                self._runner.rest()
                await self._wake.wait()
                continue
            self._apply(batch, await self._step.compute(batch, batch, self._run_step))

    def close(self) -> None:
        self._step.close()

    def _schedule(self) -> list[DecodeRequest]:
        """Pick the batch of the next step and give it its blocks."""
        while True:
            plan = self._plan()
            self._carry_out(plan)
            if plan.run or not plan.preempt:
                return [self._requests[key] for key in plan.run]

    def _plan(self) -> StepPlan:
        return plan_step(
            [
                Candidate(r.key, r.num_tokens, len(r.block_ids), r.joined, r.attempt.reserve_worst_case)
                for r in self._requests.values()
                if r.state in (State.READY, State.RUNNING)
            ],
            free_blocks=self._pool.available(),
            block_size=self._block_size,
            max_batch=self._max_batch,
            grants=self.grants.stats().grants,
            quarantined=self._pool.quarantined(),
        )

    def _carry_out(self, plan: StepPlan) -> None:
        for key in plan.preempt:
            self._preempt(self._requests[key])
        if plan.abort_newest_grant and (aborted := self.grants.abort_newest_grant()):
            self._preempt(self._requests[aborted])
        for key in plan.grow:
            self._requests[key].block_ids += self._pool.allocate(1)
        for key in plan.run:
            if self._requests[key].state is State.READY:
                self._requests[key].move(State.RUNNING)

    def _run_step(self, batch: Sequence[DecodeRequest], abort: AbortWords) -> list[Sampled | SampleFailure]:
        """On the engine's thread: one token for each sequence."""
        sequences = [
            SequenceStep(
                memory=self._memory,
                block_table=request.block_ids,
                start=request.num_tokens - 1,
                token_ids=request.output_ids[-1:],
                wants_logits=True,
            )
            for request in batch
        ]
        logits = self._runner.step(sequences, abort)
        return sample(logits, [request.attempt.sample_row(request.output_ids) for request in batch])

    def _apply(self, batch: list[DecodeRequest], outcome: Sequence[Sampled | SampleFailure]) -> None:
        """Take the step's tokens, let go of what ended meanwhile, send one message per gateway."""
        self.steps += 1
        for request, sampled in zip(batch, outcome, strict=True):
            if request.state is State.ENDED:
                self._release(request)
            elif isinstance(sampled, SampleFailure):
                self._fail(request, work_pb2.FAILURE_REASON_INTERNAL, sampled.reason)
            else:
                self._accept(request, sampled.token_id)
        for gateway in {request.gateway for request in batch}:
            gateway.flush()
        self._prefixes.tell()

    # ---- one request ---------------------------------------------------------------------------------

    def _accept(self, request: DecodeRequest, token_id: int, *, first: bool = False) -> None:
        """Append one token, tell the gateway, end the request if the token ends it."""
        request.output_ids.append(token_id)
        times = request.times_now() if first else None
        request.gateway.token(request.key, len(request.output_ids) - 1, token_id, times)
        self._prefixes.publish(request)
        if (reason := request.finish_reason()) is not None:
            request.gateway.finished(request.key, reason, request.times_now())
            self._end(request, "finished")

    def _preempt(self, request: DecodeRequest) -> None:
        """Take its blocks; the gateway prefills prompt and delivered tokens again."""
        request.gateway.preempted(request.key, request.times_now())
        request.gateway.flush()
        self._end(request, "preempted")

    def _fail(self, request: DecodeRequest, reason: int, message: str) -> None:
        request.gateway.failed(request.key, reason, message, request.times_now())
        self._end(request, "failed")

    def _end(self, request: DecodeRequest, outcome: str) -> None:
        """Last station of every request: leaves the batch, gives its blocks back as soon as it may."""
        before = request.state
        request.move(State.ENDED)
        del self._requests[request.key]
        request.gateway.keys.discard(request.key)
        if before is State.ATTACHED:
            self.grants.cancel(request.key)
        elif self._step.writes(request):
            self._step.abort(request)  # its blocks follow after the step
        else:
            self._release(request)
        self._listeners.ended(request, outcome)

    def _release(self, request: DecodeRequest) -> None:
        self._pool.release(request.block_ids)
        request.block_ids = []
        self._prefixes.tell()
        self.grants.blocks_freed()
