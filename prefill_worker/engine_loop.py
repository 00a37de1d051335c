"""The prefill loop: ask, schedule, run, apply; and the life of the requests in it.

One event loop owns all of this; only `run_step` happens on the engine's own thread. Each request that
has asked for blocks has a task of its own (prefill_worker/handover.py) that speaks to its decode worker,
so that a chunk is pushed while the next one is computed. A request that must stop while a step is writing
its blocks is told to at the next layer, and its promise of no further write goes out after that step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence

from diptych.worker.v1 import prefill_pb2, work_pb2
from engine.batch import AbortWords
from engine.runner import Runner
from engine.sampling import SampleFailure
from kvtransfer.client import HandoffClient
from kvtransfer.granted import Granted
from kvtransfer.messages import Key
from prefill_worker.chunk_step import Computed, Row, run_step
from prefill_worker.gateway_stream import GatewayStream
from prefill_worker.handover import Outcome, hand_over
from prefill_worker.request import ChunkDone, PrefillRequest, State, Stop
from prefill_worker.scheduler import plan_asks, plan_chunks
from runtime.failpoints import reach
from worker.attempt import Attempt
from worker.grammar import Grammars, GrammarState
from worker.scored_tokens import failure_reason
from worker.step import StepThread
from worker.step_clock import StepClock

log = logging.getLogger(__name__)

LOOKAHEAD_STEPS = 2
"""Prompts ask for blocks when the granted ones fill less than this many steps: one to run, one to follow."""


class EngineLoop:
    """Chunked prefill for several gateways into the pools of several decode workers."""

    handoff: HandoffClient
    grammars: Grammars

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
        self._block_size = block_size
        self._chunk = chunk
        self._enough = enough
        self._max_prompts = max_prompts
        self._max_context = max_context
        self._on_ended = on_ended
        self._step: StepThread[PrefillRequest] = StepThread(computes=not runner.launches)
        self._wake = asyncio.Event()
        self._requests: dict[Key, PrefillRequest] = {}
        self._tasks: dict[Key, asyncio.Task[Outcome]] = {}
        self._arrived = 0
        self.steps = 0  # grows with every step: the heartbeat's progress
        self.draining = False

    # ---- what others tell the loop -------------------------------------------------------------------

    def dispatch(self, dispatch: prefill_pb2.Dispatch, gateway: GatewayStream) -> None:
        """Queue an attempt."""
        attempt = Attempt.from_work(dispatch.work, max_context=self._max_context)
        if attempt.key in self._requests:
            log.warning("attempt %s dispatched twice; the second is ignored", attempt.key)
            return
        if self.draining:
            gateway.failed(attempt.key, work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING))
            return
        self._arrived += 1
        request = self._requests[attempt.key] = PrefillRequest(
            attempt,
            attempt.token_ids,
            gateway,
            self._arrived,
            dispatch.decode_address,
            dispatch.decode_incarnation,
        )
        gateway.keys[attempt.key] = None
        reach("prefill.queued")
        if attempt.grammar is not None:
            compiling = self.grammars.start(attempt.grammar, attempt.delivered_ids)
            compiling.add_done_callback(functools.partial(self._compiled, request))
        self._wake.set()

    def _compiled(self, request: PrefillRequest, compiling: asyncio.Task[GrammarState]) -> None:
        """Tokens can be sampled, or not: the gateway has tried the grammar, but not with this vocabulary."""
        if compiling.cancelled() or request.state is State.ENDED:
            return
        if (error := compiling.exception()) is not None:
            log.warning("the grammar of %s: %s", request.key, error)
            self._stop(request, Stop(work_pb2.Failure(reason=work_pb2.FAILURE_REASON_NOTHING_ALLOWED)))
        else:
            request.grammar = compiling.result()
        self._wake.set()

    def cancel(self, key: Key, choices: Collection[int] = ()) -> None:
        """The gateway wants these choices no longer, or none if none are named: nothing more is said of them.

        The prompt is computed for those that are left; first tokens are sampled for all, since the decode
        worker knows them by their order.
        """
        if request := self._requests.get(key):
            request.wanted -= set(choices) or request.wanted
            if not request.wanted:
                self._stop(request, Stop())

    def gateway_lost(self, gateway: GatewayStream) -> None:
        """Its stream ended: every attempt that came over it is cancelled."""
        for key in list(gateway.keys):
            self.cancel(key)
        gateway.close()

    def on_abort(self, key: Key) -> None:
        """The decode worker calls a grant back. It tells the gateway why; we only stop."""
        self.cancel(key)

    def on_peer_lost(self, address: str, keys: Sequence[Key]) -> None:
        """A decode worker went away with these grants: there is nothing left to write to."""
        failure = work_pb2.Failure(
            reason=work_pb2.FAILURE_REASON_PEER_LOST, message=f"decode worker at {address} is gone"
        )
        for key in keys:
            if request := self._requests.get(key):
                self._stop(request, Stop(failure))

    def tick(self, now: float) -> None:
        """A few times a second: stop what is past its deadline, also when the gateway is slow or gone."""
        for request in list(self._requests.values()):
            if (deadline := request.attempt.deadline) is not None and now >= deadline:
                failure = work_pb2.Failure(
                    reason=work_pb2.FAILURE_REASON_DEADLINE, message=request.state.value
                )
                self._stop(request, Stop(failure))

    def hand_back(self) -> None:
        """This worker leaves: the gateways prefill what is here elsewhere."""
        for request in list(self._requests.values()):
            failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING, message=request.state.value)
            self._stop(request, Stop(failure))

    @property
    def busy(self) -> bool:
        """Whether a step is being computed; prompts whose blocks are on their way make nobody busy."""
        return self._step.busy

    @property
    def clock(self) -> StepClock:
        """How long its steps take."""
        return self._step.clock

    @property
    def num_running(self) -> int:
        return sum(request.state is State.GRANTED for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute, cached ones not yet known to be so included."""
        return sum(request.remaining for request in self._requests.values())

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
            rows = [(self._requests[chunk.key], chunk) for chunk in chunks]
            batch = [request for request, _ in rows]
            tokens = sum(chunk.tokens for chunk in chunks)
            self._runner.own()
            self._runner.set_backlog(self.waiting_tokens > tokens)
            self._apply(rows, await self._step.compute(batch, rows, self._run_step, tokens))

    def flush_prefix_cache(self) -> int:
        """Forget the prefixes of the own copies, where there are some. How many keys went."""
        return self.handoff.flush_prefix_cache()

    def close(self) -> None:
        self._step.close()
        self._runner.rest()

    def _computable(self) -> list[PrefillRequest]:
        return [request for request in self._requests.values() if request.computable]

    def _ask(self) -> None:
        """Let the prompts that are about to run ask for blocks."""
        by_state: dict[State, list[PrefillRequest]] = {state: [] for state in State}
        for request in self._requests.values():
            by_state[request.state].append(request)
        keys = plan_asks(
            [r.plan_entry for r in by_state[State.QUEUED]],
            [r.plan_entry for r in by_state[State.ASKED]],
            [r.plan_entry for r in by_state[State.GRANTED]],
            lookahead=LOOKAHEAD_STEPS * self._chunk,
            max_prompts=self._max_prompts,
        )
        for key in keys:
            request = self._requests[key]
            request.move(State.ASKED)
            task = asyncio.create_task(self._hand_over(request), name=f"hand-over {key}")
            task.add_done_callback(functools.partial(self._handed_over, request))
            self._tasks[key] = task
            reach("prefill.asked")

    async def _hand_over(self, request: PrefillRequest) -> Outcome:
        granted = functools.partial(self._granted, request)
        return await hand_over(request, self.handoff, self._block_size, granted)

    def _handed_over(self, request: PrefillRequest, task: asyncio.Task[Outcome]) -> None:
        """A callback of the task, not its last lines: one cancelled before its first line ends here too."""
        if task.cancelled():
            outcome = Outcome(failure=request.stop.failure if request.stop is not None else None)
        elif (error := task.exception()) is not None:
            log.error("hand-over of %s", request.key, exc_info=error)
            reason = work_pb2.FAILURE_REASON_INTERNAL
            outcome = Outcome(failure=work_pb2.Failure(reason=reason, message="hand-over failed"))
        else:
            outcome = task.result()
        self._end(request, outcome)

    def _run_step(self, rows: Sequence[Row], abort: AbortWords) -> list[Computed | SampleFailure]:
        return run_step(self._runner, rows, abort)

    def _apply(self, rows: Sequence[Row], outcome: Sequence[Computed | SampleFailure]) -> None:
        """Tell each request's hand-over what its blocks hold now, and its gateway the prompt's scores."""
        self.steps += 1
        now = time.monotonic()
        for (request, chunk), computed in zip(rows, outcome, strict=True):
            if request.stop is not None:
                request.news.put_nowait(request.stop)
                continue
            if isinstance(computed, SampleFailure):
                failure = work_pb2.Failure(reason=failure_reason(computed), message=computed.reason)
                self._stop(request, Stop(failure))
                continue
            if computed.prompt_scores:
                position = request.computed + 1
                request.gateway.prompt_scores(request.key, position, computed.prompt_scores)
            request.computed += chunk.tokens
            request.steps += 1
            if chunk.last:
                request.computed_at = now
            else:
                reach("prefill.chunk")
            request.news.put_nowait(ChunkDone(request.computed, computed.first_tokens))

    # ---- one request ---------------------------------------------------------------------------------

    def _granted(self, request: PrefillRequest, granted: Granted) -> None:
        """The hand-over has blocks: the request joins the next step."""
        request.granted = granted
        request.computed = granted.computed_tokens
        request.move(State.GRANTED)
        if request.stop is not None:  # cancelled while it asked, too late for that
            request.news.put_nowait(request.stop)
        reach("prefill.granted")
        self._wake.set()

    def _stop(self, request: PrefillRequest, stop: Stop) -> None:
        """Decide that the request ends without a commit; carried out when no step writes any more."""
        if request.stop is not None:
            return
        request.stop = stop
        if self._step.writes(request):
            self._step.abort(request)
        elif request.state is State.GRANTED:
            request.news.put_nowait(stop)
        elif request.state is State.ASKED:
            self._tasks[request.key].cancel()
        else:
            self._end(request, Outcome(failure=stop.failure))

    def _end(self, request: PrefillRequest, outcome: Outcome) -> None:
        """Last station of every request. Silence to the gateway means cancelled."""
        request.move(State.ENDED)
        del self._requests[request.key]
        self._tasks.pop(request.key, None)
        request.gateway.keys.pop(request.key, None)
        if outcome.committed:
            request.gateway.committed(request.key)
        elif outcome.failure is not None:
            request.gateway.failed(request.key, outcome.failure)
        how = "committed" if outcome.committed else "cancelled" if outcome.failure is None else "failed"
        self._on_ended(request, how)
        self._wake.set()
