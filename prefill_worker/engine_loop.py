"""The prefill loop: ask, schedule, run, apply.

One event loop owns all of this; only `run_step` happens on the engine's own thread. The attempts' own tasks
(kv_sender.py) push the chunks of a step while the next one is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from diptych.engine.batch import AbortWords
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleFailure
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from diptych.worker_process.draft_chunks import PromptDrafts
from diptych.worker_process.logprob_codec import failure_reason
from diptych.worker_process.prompt_chunk import Computed
from diptych.worker_process.step_thread import StepThread
from diptych.worker_process.step_watchdog import StepWatchdog
from prefill_worker.chunk_step import Row, run_step
from prefill_worker.image_encoding import ImageEncoding
from prefill_worker.request import ChunkDone, PrefillRequest, State, Stop
from prefill_worker.request_manager import RequestManager
from prefill_worker.scheduler import Chunk, plan_asks, plan_chunks

log = logging.getLogger(__name__)

LOOKAHEAD_STEPS = 2
"""Prompts ask for blocks when the granted ones fill less than this many steps: one to run, one to follow."""
BLOCKS_SHORT_S = 0.1
"""A prompt that waits for blocks longer than this waits for want of them, and not for an answer."""


Writing = Callable[[Sequence[KVMemory]], AbstractContextManager[None]]


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
        images: ImageEncoding | None = None,
        draft_chunks: PromptDrafts | None = None,
        writing: Writing | None = None,
    ) -> None:
        """Compute by `runner`; `writing` lets a step write to memories, where it has to be let."""
        self._runner = runner
        self._writing = writing
        self._draft_chunks = draft_chunks
        self._cpu = runner.cpu
        self._chunk = chunk
        self._enough = enough
        self._max_prompts = max_prompts
        self._step: StepThread[PrefillRequest] = StepThread(runner.cpu)
        self._wake = asyncio.Event()
        self.requests = RequestManager(
            self._step,
            block_size=block_size,
            max_context=max_context,
            on_ended=on_ended,
            wake=self._wake.set,
            images=images,
        )
        self._images = images
        self.steps = 0  # grows with every step: the heartbeat's progress

    # ---- its server ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End requests past their deadline. Called a few times a second."""
        self.requests.expire(now)

    def hand_back(self) -> None:
        """See `RequestManager.hand_back`."""
        self.requests.hand_back()

    @property
    def draining(self) -> bool:
        """True if nothing new is taken."""
        return self.requests.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.requests.draining = draining

    @property
    def busy(self) -> bool:
        """True while a step is being computed; prompts that wait for blocks do not count."""
        return self._step.busy

    @property
    def watchdog(self) -> StepWatchdog:
        """Durations of its steps."""
        return self._step.watchdog

    @property
    def num_running(self) -> int:
        return sum(request.state is State.GRANTED for request in self.requests.all())

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute, including those that may turn out to be cached."""
        return sum(request.remaining for request in self.requests.all())

    def flush_prefix_cache(self) -> int:
        """Forget the prefixes of own copies of blocks, and images' embeddings; return how many keys went."""
        if self.requests.fetching is not None:
            self.requests.fetching.flush()
        return self.requests.handoff.flush_prefix_cache()

    def close(self) -> None:
        """Wait for the running step and yield the cores."""
        self._step.close()
        self._cpu.yield_()

    # ---- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until cancelled; sleeps while there is nothing to do."""
        while True:
            self._wake.clear()
            self._ask_for_blocks()
            encoded = self._images is not None and await self._encode(self._images)
            chunks = self._plan()
            if chunks and self._cpu.turns is not None:
                await self._cpu.turns.begin_prompts()
                chunks = self._plan()  # some may have ended meanwhile, and others come
                if not chunks:
                    self._cpu.turns.end_prompts()
                    continue
            if not chunks:
                if encoded:
                    continue
                self._cpu.yield_()
                await self._wake.wait()
                continue
            rows = [(self.requests[chunk.key], chunk) for chunk in chunks]
            batch = [request for request, _ in rows]
            tokens = sum(chunk.tokens for chunk in chunks)
            self._cpu.claim()
            self._publish_backlog(batch, tokens)
            started = time.monotonic()
            outcome = await self._step.compute(batch, rows, self._run_step, tokens)
            if self._cpu.turns is not None:
                self._cpu.turns.end_prompts()
            self.requests.handoff.pull_rates.computed(tokens, time.monotonic() - started)
            self._apply(rows, outcome)
            del rows, batch, outcome  # while it sleeps they would keep the pools of dead workers

    def _plan(self) -> list[Chunk]:
        """Return the chunks of the next step."""
        return plan_chunks([r.plan_entry for r in self._computable()], self._chunk, self._enough)

    async def _encode(self, images: ImageEncoding) -> bool:
        """Encode a tile of an image that a prompt waits for; return whether there was one."""
        found = images.next_waiting(self.requests.all())
        if found is None:
            return False
        request, image = found
        self._cpu.claim()
        request.begin(time.monotonic())
        try:
            await images.encode(image, self._step)
            if request.images is not None:
                request.images.encoded_at = time.monotonic()
        except Exception:
            log.exception("an image of %s could not be encoded", request.key)
            reason, words = work_pb2.FAILURE_REASON_COMPUTE_FAILED, "an image could not be encoded"
            self.requests.stop(request, Stop(work_pb2.Failure(reason=reason, message=words)))
        return True

    def _computable(self) -> list[PrefillRequest]:
        return [request for request in self.requests.all() if request.computable]

    def _publish_backlog(self, batch: Sequence[PrefillRequest], tokens: int) -> None:
        """Publish for how long prompts have waited, if this step leaves some of them to the next one."""
        now = time.monotonic()
        for request in batch:
            request.begin(now)
        waiting = self._waiting_for_cores(now)
        left = sum(request.remaining for request in waiting) > tokens
        self._cpu.set_backlog(max(request.waited_s(now) for request in waiting) if left else None)

    def _waiting_for_cores(self, now: float) -> list[PrefillRequest]:
        """Return the unfinished prompts; where blocks are short, only those that have blocks.

        The others wait for decode steps to free some, and cores would not help them.
        """
        short = any(
            request.state is State.ASKED and now - request.entered[State.ASKED] > BLOCKS_SHORT_S
            for request in self.requests.all()
        )
        return self._computable() if short else [r for r in self.requests.all() if r.stop is None]

    def _ask_for_blocks(self) -> None:
        """Let the prompts that are about to run ask for blocks."""
        by_state: dict[State, list[PrefillRequest]] = {state: [] for state in State}
        for request in self.requests.all():
            by_state[request.state].append(request)
        keys = plan_asks(
            [r.plan_entry for r in by_state[State.QUEUED] if r.may_ask],
            [r.plan_entry for r in by_state[State.ASKED]],
            [r.plan_entry for r in by_state[State.GRANTED]],
            lookahead=LOOKAHEAD_STEPS * self._chunk,
            max_prompts=self._max_prompts,
        )
        for key in keys:
            self.requests.ask(self.requests[key])

    def _run_step(self, rows: Sequence[Row], abort: AbortWords) -> list[Computed | SampleFailure]:
        if self._writing is None:
            return run_step(self._runner, rows, abort, self._draft_chunks)
        granted = [request.granted for request, _ in rows]
        with self._writing([one.memory for one in granted if one is not None]):
            return run_step(self._runner, rows, abort, self._draft_chunks)

    def _apply(self, rows: Sequence[Row], outcome: Sequence[Computed | SampleFailure]) -> None:
        """Report computed chunks to each request's handoff, and prompt log-probabilities to its gateway."""
        self.steps += 1
        now = time.monotonic()
        for (request, chunk), computed in zip(rows, outcome, strict=True):
            if request.state is State.ENDED:
                self.requests.release_adapter(request)
            if request.stop is not None:
                request.events.put_nowait(request.stop)
                continue
            if isinstance(computed, SampleFailure):
                failure = work_pb2.Failure(reason=failure_reason(computed), message=computed.reason)
                self.requests.stop(request, Stop(failure))
                continue
            if computed.prompt_scores:
                position = request.computed + 1
                request.gateway.prompt_scores(request.key, position, computed.prompt_scores)
            request.computed += chunk.tokens
            request.steps += 1
            if chunk.last:
                request.computed_at = now
                self.requests.send_first_tokens(request, computed.first_tokens)
            else:
                reach("prefill.chunk")
            request.events.put_nowait(ChunkDone(request.computed, computed.first_tokens))
